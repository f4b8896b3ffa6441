"""Build the runner that an experiment describes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workbench.engine.load import load
from workbench.engine.runner import Runner
from workbench.engine.uncached import disable_cache
from workbench.experiment.experiment import Experiment
from workbench.progress import to_stderr
from workbench.simulate.executor_settings import UncachedExecutor


def runner_for(experiment: Experiment, on_progress: Callable[[str], None] = to_stderr, **overrides: Any) -> Runner:
    """Build the runner of an experiment. `on_progress` and `overrides` are passed on to `load`."""
    model, cache, schedule = experiment.model, experiment.cache, experiment.schedule
    runner = load(
        model.name,
        dtype=model.dtype,
        weights=model.weights,
        head_weights=model.head_weights,
        weight_group=model.weight_group,
        activations=model.activations,
        backend=experiment.backend,
        compile=experiment.compile,
        batch_invariant=experiment.batch_invariant,
        device=model.device,
        seed=model.seed,
        max_num_seqs=schedule.max_num_seqs,
        max_num_batched_tokens=schedule.max_num_batched_tokens,
        chunk_tokens=schedule.chunk_tokens,
        chunked_prefill=schedule.chunked_prefill,
        schedule=schedule.kind,
        policy=schedule.policy,
        preemption_mode=schedule.preemption_mode,
        page_size=cache.page_size,
        pages=cache.pages,
        cache=cache,
        prefix=cache.prefix,
        offload=cache.offload,
        evict=cache.evict,
        overflow=schedule.overflow,
        attention=experiment.attention,
        speculate=experiment.speculate,
        report=on_progress,
        **overrides,
    )
    if isinstance(experiment.executor, UncachedExecutor):
        disable_cache(runner, experiment.executor.oracle)
    return runner
