"""Hand a sequence that has finished its prompt over to another engine, which decodes it.

    prefill engine:  prompt, first token -> hand_over: pages lent, sequence ended as `moved`
    decode engine:   adopt -> submitted after these tokens, on these pages -> decode

Engines that map one memory (`SharedPages`) hand over page numbers; nothing is copied. Others hand over the bytes of
    the pages. What a page holds is the same in both: an adopted sequence is one that waits on pages, as a sample that
shares its parent's does. It may lose them, and is then computed again like any preempted one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from workbench.cluster.apart.lending import HandedPages, lend_pages, shared_pools
from workbench.engine.cache import Adoption
from workbench.engine.resume import why_not_resumable
from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.request import Request, Sequence
from workbench.trace.events import Event


@dataclass(frozen=True)
class Handover:
    """A sequence in transfer: the request with its generated tokens, and the pages that its next query reads."""

    request: Request
    handed: HandedPages


def why_not_apart(request: Request) -> str | None:
    """Return why one engine must both prefill and decode `request`; None if one engine may prefill it and another
    decode it.
    """
    if request.sampling.num_sequences > 1:
        return "samples and beams share the pages of their prompt within one engine"
    return why_not_resumable(request)


def ready_sequences(runner: Runner) -> Iterator[Sequence]:
    """Yield the running sequences that have computed their prompt and sampled a token. Call it between two steps."""
    for sequence in runner.scheduler.running:
        if sequence.num_new_tokens == 1 and sequence.output_ids and not why_not_apart(sequence.request):
            yield sequence


def hand_over(runner: Runner, sequence: Sequence) -> Handover:
    """Lend the pages of a sequence to another process, and end the sequence here as `moved`. `take_back` ends the
    loans."""
    handed = lend_pages(runner.kv_cache.manager, sequence)
    return Handover(end_as_moved(runner, sequence), handed)


def end_as_moved(runner: Runner, sequence: Sequence) -> Request:
    """End a sequence as `moved`; return the request that continues after its tokens."""
    request = replace(sequence.request, generated_ids=tuple(sequence.output_ids))
    runner.tracker.move_out(sequence)
    return request


def adopt(runner: Runner, request: Request, adoption: Adoption, queue: deque[Event] | None = None) -> int:
    """Submit a request that continues after its `generated_ids`, on pages that another engine computed.

    Returns:
        the number of Finished events to expect, as `Runner.submit`.

    Raises:
        WorkbenchError: for a request that has no tokens yet, or whose samples share pages.
    """
    if not request.generated_ids or (why := why_not_apart(request)):
        raise WorkbenchError(f"request {request.request_id} cannot be adopted: {why or 'it has no tokens yet'}")
    runner.tracker.expect_pages(request.request_id, adoption)
    return runner.submit(request, queue)


def take_back(runner: Runner, pages: list[list[int]], tainted: bool = False) -> None:
    """End loans of this engine's pages, one loan for each time that a page is listed.

    Args:
        runner: the engine that owns the pages.
        pages: page numbers by cache group.
        tainted: whether a process that died may have written to the pages.
    """
    for group, (pool, its) in enumerate(zip(shared_pools(runner.kv_cache.manager), pages, strict=True)):
        freed = pool.take_back(its)
        if tainted:
            runner.store.zero_pages(group, freed)


def pop_returned(runner: Runner) -> list[list[int]]:
    """Return the borrowed pages, by cache group, that are to be given back to the engines that own them."""
    return [pool.pop_returned() for pool in shared_pools(runner.kv_cache.manager)]


def drop_idle_borrowed(runner: Runner) -> None:
    """Drop the borrowed pages that no sequence references, so that they are given back to their owners."""
    manager = runner.kv_cache.manager
    for group, pool in enumerate(shared_pools(manager)):
        if manager.prefix_cache is not None:
            manager.prefix_cache.drop_pages(group, list(pool.idle))
