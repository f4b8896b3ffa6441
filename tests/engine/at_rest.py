"""Pages and books of a runner in which nothing runs."""

from __future__ import annotations

from workbench.engine.runner import Runner


def at_rest(runner: Runner) -> None:
    scheduler = runner.scheduler
    assert not runner.has_unfinished_requests and scheduler.pages_in_use == 0 and not scheduler._queue.by_id
    assert not runner.tracker.sequences and not runner.core.decoder.sampler._states and not runner.core.decoder.methods
    assert not runner.tracker._sent
    for pool in scheduler.pools:
        assert pool.num_free + len(pool.evictable) == pool.num_pages
    runner.reset_prefix_cache()
    assert all(pool.num_free == pool.num_pages for pool in scheduler.pools)
