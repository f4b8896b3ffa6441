"""The standard benchmark of a model: prefill and decode at two depths, for one sequence and for sixteen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from compiled_kernels import Backend, backend_problems
from workbench.cache.pages import pages_for
from workbench.engine.load import SHAPE_PREFIX, BUNDLED_MODELS, load
from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.model.families import read_spec
from workbench.model.shapes import named_shape
from workbench.model.spec import ModelSpec
from workbench.stages import StageCounter
from workbench.study.bench_rows import skipped_row, bench_row
from workbench.study.bench_works import BenchRepetition, PromptAndOutput, BenchCase, max_sequence_length, run_repetition
from workbench.study.ceilings import MachineCeilings, ceilings_for
from workbench.study.environment import environment
from workbench.study.fresh_process import cold_start, memory_in_decode
from workbench.study.machine import cpu_times, others_cpu_share
from workbench.study.measure_ceilings import intra_op_threads

BATCHES, DEPTHS = (1, 16), (0, 4096)
MAX_STEP_TOKENS = 512  # that a step computes
PAGE_SIZE = 64


def standard_cases(
    batches: Sequence[int] = BATCHES, depths: Sequence[int] = DEPTHS, prompt: int = 512, output: int = 128
) -> tuple[BenchCase, ...]:
    places = [(batch, depth) for batch in batches for depth in depths]
    return tuple(BenchCase(kind, *place, prompt, output) for place in places for kind in ("prefill", "decode"))


def mixed_case(lengths: Sequence[PromptAndOutput]) -> BenchCase:
    return BenchCase("mixed", len(lengths), lengths=tuple(lengths))


def bench(
    model: str,
    cases: Sequence[BenchCase] | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    threads: int | None = None,
    repetitions: int = 3,
    memory: bool = True,
    cold: bool = False,
    on_progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Benchmark a model on this machine and return the record.

    Cases are timed in interleaved repetitions after one warm-up. A case longer than the model's context becomes a row
    with the reason.

    Args:
        model: A folder, a shipped model, or `shape:NAME` with random weights.
        cases: What to time; None is `standard_cases()`.
        settings: Further arguments of `workbench.load`: dtype, backend, weights, seed.
        threads: Intra-operator threads of torch; None keeps the present number.
        repetitions: Timed repetitions of each case, at least 1.
        memory: Also measure memory in decode, in a process of its own for each batch size.
        cold: Also time a cold and a warm start, in processes of their own.
        on_progress: Called with one line of text before each piece of work.

    Raises:
        WorkbenchError: For fewer than one repetition, or depths that are no multiple of a prefill step.
    """
    if repetitions < 1:
        raise WorkbenchError(f"repetitions {repetitions}: must be at least 1")
    cases, settings = tuple(standard_cases() if cases is None else cases), {"model": model, **(settings or {})}
    before, surroundings = cpu_times(), environment()
    with intra_op_threads(threads) as used:
        spec, budget = _spec(model), step_token_budget(cases)
        possible = [work for work in cases if max_sequence_length(work, budget) <= spec.max_position_embeddings]
        decodes = [work for work in possible if work.kind == "decode" and not work.depth] if memory else []
        on_progress = StageCounter(on_progress, 2 + (repetitions + 1) * len(possible) + len(decodes) + cold)
        on_progress("loading")
        runner = load(
            **settings, max_num_batched_tokens=budget, page_size=PAGE_SIZE, **_runner_limits(possible, budget), report=on_progress
        )  # fmt: skip
        found: dict[BenchCase, list[BenchRepetition]] = {work: [] for work in possible}
        for turn in range(repetitions + 1):
            for work in possible:
                on_progress(f"{f'{turn}/{repetitions}' if turn else 'warm-up'}: {work.kind} {work.batch} at {work.depth}")
                figures = run_repetition(runner, work, turn)
                found[work] += [figures] if turn else []
        busy = others_cpu_share(before)
        on_progress("measuring what this machine reads and multiplies at best")
        rows = [
            bench_row(work, found[work], runner, _ceilings(runner, found[work], used))
            if work in found
            else skipped_row(work, f"{max_sequence_length(work, budget)} tokens, the model's context is {spec.max_position_embeddings}")
            for work in cases
        ]
        record = {
            "question": "How fast is this model on this machine, and how near to its limits?",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "model": {"name": model, "parameters": spec.num_parameters, "weight_bytes": runner.model.weight_bytes},
            "settings": {**settings, "threads": used, "repetitions": repetitions, "backend_used": str(runner.backends)},
            "backend_reason": runner.backends.reason,
            "artifacts": dict(runner.executor.artifacts),
            "rows": rows,
            "memory": [],
            "cold_start": None,
            "others_cpu_share": busy,
            "environment": surroundings,
        }
    del runner  # its memory is no part of what the other processes find
    for work in decodes:
        on_progress(f"memory in decode, batch {work.batch}")
        record["memory"].append(memory_in_decode(settings, used, work.batch, work.prompt, work.output))
    if cold:
        on_progress("cold start")
        record["cold_start"] = cold_start(settings, used)
    return record


def step_token_budget(cases: Sequence[BenchCase]) -> int:
    """Return the tokens that one step may compute, so that a prefill step begins at every measured depth.

    Raises WorkbenchError where the depths, prompts and batch sizes do not allow it."""
    budget = min([MAX_STEP_TOKENS, *(work.prompt for work in cases if work.kind != "mixed")])
    for work in cases:
        if work.depth % budget:
            raise WorkbenchError(f"depth {work.depth}: must be a multiple of {budget}, the tokens of a step of prefill")
        if work.batch >= budget:
            raise WorkbenchError(f"batch {work.batch}: must be below {budget}, the tokens of a step")
    return budget


def _ceilings(runner: Runner, figures: Sequence[BenchRepetition], threads: int) -> MachineCeilings:
    """Return the machine's ceilings at the working set that a step of this case reads."""
    name = str(runner.model.dtype).removeprefix("torch.")
    rated = (name if name in ("float32", "bfloat16") else "float32",)
    size = runner.model.weight_bytes + max(each.kv_bytes for each in figures)
    return ceilings_for(size, threads=threads, dtypes=rated, compiled=backend_problems()[Backend.INDUCTOR] is None)


def _spec(model: str) -> ModelSpec:
    if model.startswith(SHAPE_PREFIX):
        return named_shape(model.removeprefix(SHAPE_PREFIX))
    return read_spec(BUNDLED_MODELS.get(model, Path(model)))


def _runner_limits(cases: Sequence[BenchCase], budget: int) -> dict[str, Any]:
    """Return the runner's limits that depend on the cases: `max_num_seqs` and `pages`."""
    pages = [
        sum(pages_for(prompt + output, PAGE_SIZE) for prompt, output in work.lengths)
        or work.batch * pages_for(max_sequence_length(work, budget), PAGE_SIZE)
        for work in cases
    ]
    return {"max_num_seqs": max((work.batch for work in cases), default=1), "pages": max(pages, default=1)}
