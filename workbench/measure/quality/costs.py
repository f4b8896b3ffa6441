"""Measure memory and time of variants: bytes per token, sequences that fit into a pool, and decode steps by context
length, timed for all runners in turn."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Annotated, Any

from pydantic import Field

from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.experiment.experiment import Experiment
from workbench.experiment.variants import REFERENCE
from workbench.kv_cache.eviction import parse_eviction
from workbench.measure.rounds import check_full_length, greedy_sampling, load_runners
from workbench.memory.capacity import (
    lasting_bytes_per_token,
    max_concurrent_sequences,
    meta_kv_store,
    page_bytes,
    spec_and_dtype,
    split_budget_into_pages,
)
from workbench.request import Request, random_token_ids
from workbench.settings import Count, Settings
from workbench.trace.events import Stepped

ProgressCallback = Callable[[str], None]
OUTPUT_TOKENS = 4  # number of tokens decoded after the text, while memory is measured


class DecodeSpeedSettings(Settings):
    """Settings of decode speed: one sequence decodes at each context length, all variants in turn."""

    model: str | None = None  # model that is timed; None: the one measured for quality
    dtype: str | None = None
    backend: str | None = None
    contexts: Annotated[tuple[Count, ...], Field(min_length=1)] = (128, 512, 896)
    tokens: Count = 16  # number of decode steps in each round
    rounds: Count = 3


class PoolSettings(Settings):
    """Settings of capacity: an amount of memory, and the context length of the sequences that fill it."""

    model: str | None = None
    dtype: str | None = None
    bytes: Count = 2**26
    context: Count | None = None  # tokens of each sequence; None: the model's maximum context


def time_decode_steps(
    runners: Mapping[str, Runner],
    contexts: Sequence[int],
    tokens: int,
    rounds: int,
    on_progress: ProgressCallback = lambda line: None,
) -> list[dict]:
    """Time decode steps, and return one row for each runner and context, with the seconds of each step.

    Every round takes `tokens` steps of each runner in turn, after one warm-up round."""
    rows = []
    for context in contexts:
        open_ones: dict[str, Iterator[Stepped]] = {}
        try:
            for name, runner in runners.items():
                on_progress(f"decode at {context:,}: {name}")
                open_ones[name] = _decoding(runner, context, tokens * (rounds + 1))
                _take(open_ones[name], tokens)  # prefill, and steps that compile
            seconds: dict[str, list[float]] = {name: [] for name in runners}
            for _ in range(rounds):
                for name, steps in open_ones.items():
                    seconds[name] += [step.wall_seconds for step in _take(steps, tokens)]
        finally:
            for steps in open_ones.values():
                steps.close()  # type: ignore[attr-defined] (a generator)
        rows += [
            {
                "variant": name, "context": context, "backend": str(runner.core.backends),
                "tokens_per_s": 1 / median(seconds[name]), "step_s": seconds[name],
            }
            for name, runner in runners.items()
        ]  # fmt: skip
    return rows


def _take(steps: Iterator[Stepped], count: int) -> list[Stepped]:
    return [next(steps) for _ in range(count)]


def _decoding(runner: Runner, context: int, tokens: int) -> Iterator[Stepped]:
    """Yield the decode steps of one sequence after a prompt of `context` tokens."""
    prompt = random_token_ids(random.Random(context), runner.model.spec.vocab_size, context)
    sampling = greedy_sampling(tokens + 1)
    events = runner.stream([Request(f"decode-{context}", prompt, sampling)])
    try:
        for event in events:
            check_full_length(event, f"decode at a context of {context}")
            if isinstance(event, Stepped) and event.phase == "decode":
                yield event
    finally:
        events.close()  # type: ignore[attr-defined] (a generator)


def cache_bytes(runner: Runner, ids: Sequence[int]) -> dict[str, Any]:
    """Return the bytes of the pages that one sequence of len(ids) tokens holds while it decodes, in total and per
    token.

    Bytes are counted from the tensors; tables of codecs, which all sequences share, are counted whole.
    `stored_bytes_per_token` counts only the pages where tokens are stored permanently."""
    sizes, pools = page_bytes(runner.store), runner.scheduler.pools
    sampling = greedy_sampling(OUTPUT_TOKENS)
    held = tokens = 0
    for event in runner.stream([Request("measured", tuple(ids[:-OUTPUT_TOKENS]), sampling)]):
        check_full_length(event, "memory of one sequence")
        if (
            isinstance(event, Stepped)
            and event.phase == "decode"
            and (used := [pool.num_used for pool in pools]) != [0] * len(pools)
        ):
            tokens = runner.scheduler.running[0].num_computed_tokens
            held = sum(count * size for count, size in zip(used, sizes, strict=True)) + runner.store.codec_bytes
    return {
        "kv_bytes": held,
        "kv_tokens": tokens,
        "bytes_per_token": held / tokens,
        "stored_bytes_per_token": lasting_bytes_per_token(runner.store),
    }


def measure_capacity(variants: Mapping[str, Experiment], pool: PoolSettings) -> list[dict[str, Any]]:
    """Run as many sequences as fit into pools of `pool.bytes` bytes, for each variant.

    Returns `sequences`, the number that the scheduler ran at once, `sequences_predicted`, computed from the sizes, and
    `pool_bytes`, the bytes of these pools."""
    rows = []
    for name, variant in variants.items():
        variant = with_model(variant, pool.model, pool.dtype if name != REFERENCE else None)
        page, chunk = variant.cache.page_size, variant.schedule.max_num_batched_tokens
        spec, dtype = spec_and_dtype(variant)
        store = meta_kv_store(spec, variant.cache, dtype)
        tokens = pool.context or spec.max_position_embeddings
        sizes = page_bytes(store)
        policy = parse_eviction(variant.cache.evict)
        evict = policy.budget_for(page, sum(sizes)) if policy is not None else None
        pages, fit = split_budget_into_pages(store.groups, sizes, pool.bytes, tokens, chunk, page, evict)
        ran = max_concurrent_sequences(store.groups, pages, page, tokens, chunk, fit, evict)
        rows.append({
            "sequences": ran, "sequences_predicted": fit, "sequence_tokens": tokens,
            "pool_bytes": sum((count + 1) * size for count, size in zip(pages, sizes, strict=True)),
        })  # fmt: skip
    return rows


def validate_contexts(variants: Mapping[str, Experiment], settings: DecodeSpeedSettings) -> None:
    """Raise WorkbenchError if a context to be timed exceeds a model's maximum context."""
    longest = max(settings.contexts) + settings.tokens * (settings.rounds + 1)
    for variant in variants.values():
        context = spec_and_dtype(with_model(variant, settings.model, None))[0].max_position_embeddings
        if longest > context:
            raise WorkbenchError(f"workload.speed: {longest:,} tokens exceed the model's context of {context:,}")


def measure_decode_speed(
    variants: Mapping[str, Experiment], backend: str, settings: DecodeSpeedSettings, on_progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Time decode steps of the variants and return their rows. The reference model decodes on `settings.backend`, or
    else on `backend`."""
    timed = {}
    for name, variant in variants.items():
        variant = with_model(variant, settings.model, settings.dtype if name != REFERENCE else None)
        schedule = variant.schedule.model_copy(update={"max_num_seqs": 1})
        changes: dict[str, Any] = {"schedule": schedule}
        if settings.backend is not None or name == REFERENCE:
            changes["backend"] = settings.backend or backend
        timed[name] = variant.model_copy(update=changes)
    runners = load_runners(timed, on_progress)
    return time_decode_steps(runners, settings.contexts, settings.tokens, settings.rounds, on_progress)


def with_model(experiment: Experiment, name: str | None, dtype: str | None) -> Experiment:
    changes: dict[str, Any] = {key: value for key, value in (("name", name), ("dtype", dtype)) if value is not None}
    # the context setting belongs to the model measured for quality
    changes |= {} if name is None else {"context": None}
    return experiment.model_copy(update={"model": experiment.model.model_copy(update=changes)})
