"""Memory and time of variants: bytes a token, sequences that fit into a pool, decode steps by context length."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.request import Request, SamplingParameters
from workbench.study.cache_of import spec_and_dtype, meta_kv_store
from workbench.study.capacity import page_bytes, split_budget_into_pages, max_concurrent_sequences, lasting_bytes_per_token
from workbench.study.decode_speed import time_decode_steps
from workbench.study.experiment import Experiment
from workbench.study.quality_workload import PoolSettings, DecodeSpeedSettings
from workbench.study.runner_for import runner_for
from workbench.study.variants import REFERENCE
from workbench.trace.events import Finished, Stepped

OUTPUT_TOKENS = 4  # tokens after the text whose memory is looked at


def cache_bytes(runner: Runner, ids: Sequence[int]) -> dict[str, Any]:
    """Return the bytes of the pages that one sequence of len(ids) tokens holds while it decodes, in total and a token.

    Bytes are counted from the tensors. `stored_bytes_per_token` counts only the pages where tokens finally stay."""
    sizes, pools = page_bytes(runner.store), runner.scheduler.pools
    sampling = SamplingParameters(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    held = tokens = 0
    for event in runner.stream([Request("measured", tuple(ids[:-OUTPUT_TOKENS]), sampling)]):
        if isinstance(event, Finished) and event.reason != "length":
            raise WorkbenchError(f"memory of one sequence: {event.error or event.reason}")
        if (
            isinstance(event, Stepped)
            and event.phase == "decode"
            and (used := [pool.num_used for pool in pools]) != [0] * len(pools)
        ):
            tokens = runner.scheduler.running[0].num_computed_tokens
            held = sum(count * size for count, size in zip(used, sizes, strict=True))
    return {
        "kv_bytes": held,
        "kv_tokens": tokens,
        "bytes_per_token": held / tokens,
        "stored_bytes_per_token": lasting_bytes_per_token(runner.store),
    }


def measure_capacity(variants: Mapping[str, Experiment], pool: PoolSettings) -> list[dict[str, Any]]:
    """Run as many sequences as fit into pools of `pool.bytes`, for each variant.

    Returns `sequences` that the scheduler ran at once, `sequences_predicted` from the sizes, and the `pool_bytes` of
    these pools."""
    rows = []
    for name, variant in variants.items():
        variant = with_model(variant, pool.model, pool.dtype if name != REFERENCE else None)
        page, chunk = variant.cache.page_size, variant.schedule.max_num_batched_tokens
        spec, dtype = spec_and_dtype(variant)
        store = meta_kv_store(spec, variant.cache, dtype)
        tokens = pool.context or spec.max_position_embeddings
        sizes = page_bytes(store)
        policy = variant.cache.evict
        evict = policy.budget_for(page, sum(sizes)) if policy is not None else None
        pages, fit = split_budget_into_pages(store.groups, sizes, pool.bytes, tokens, chunk, page, evict)
        ran = max_concurrent_sequences(store.groups, pages, page, tokens, chunk, fit, evict)
        rows.append({
            "sequences": ran, "sequences_predicted": fit, "sequence_tokens": tokens,
            "pool_bytes": sum((count + 1) * size for count, size in zip(pages, sizes, strict=True)),
        })  # fmt: skip
    return rows


def validate_contexts(variants: Mapping[str, Experiment], settings: DecodeSpeedSettings) -> None:
    """Raise WorkbenchError where a model's context is too short for the contexts to be timed."""
    longest = max(settings.contexts) + settings.tokens * (settings.rounds + 1)
    for variant in variants.values():
        context = spec_and_dtype(with_model(variant, settings.model, None))[0].max_position_embeddings
        if longest > context:
            raise WorkbenchError(f"workload.speed: {longest:,} tokens exceed the model's context of {context:,}")


def measure_decode_speed(
    variants: Mapping[str, Experiment], backend: str, settings: DecodeSpeedSettings, on_progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Time decode steps of the variants and return their rows; the reference decodes on the backend of the others."""
    runners = {}
    for name, variant in variants.items():
        on_progress(f"loading for decode: {name}")
        variant = with_model(variant, settings.model, settings.dtype if name != REFERENCE else None)
        schedule = variant.schedule.model_copy(update={"max_num_seqs": 1})
        changes: dict[str, Any] = {"schedule": schedule}
        if settings.backend is not None or name == REFERENCE:
            changes["backend"] = settings.backend or backend
        runners[name] = runner_for(variant.model_copy(update=changes))
    return time_decode_steps(runners, settings.contexts, settings.tokens, settings.rounds, on_progress)


def with_model(experiment: Experiment, name: str | None, dtype: str | None) -> Experiment:
    changes = {key: value for key, value in (("name", name), ("dtype", dtype)) if value is not None}
    return experiment.model_copy(update={"model": experiment.model.model_copy(update=changes)})
