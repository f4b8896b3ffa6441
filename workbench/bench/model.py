"""Benchmark a model through the runner's public interface: prefill and decode at two depths, with batch sizes 1 and 16.

A row has medians over repetitions, their spread, and the fractions of the machine's ceilings that were reached.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median
from typing import Any, Literal

from compiled_kernels import Backend, backend_problems
from compiled_kernels.rounds import interleaved
from workbench.bench.fresh_process import cold_start, memory_in_decode
from workbench.engine.config import EngineConfig
from workbench.engine.load import load
from workbench.engine.loaded_model import SHAPE_PREFIX, model_folder
from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.kv_cache.pages import pages_for
from workbench.machine.ceilings import MachineCeilings, bound_fault, ceilings_for, gemm_dtypes, intra_op_threads
from workbench.machine.environment import environment
from workbench.machine.processor import cpu_times, others_cpu_share
from workbench.model.hf.families import read_spec
from workbench.model.shapes import named_shape
from workbench.model.spec import ModelSpec
from workbench.progress import StageCounter
from workbench.request import Request, SamplingParameters, random_token_ids
from workbench.runs.metrics import percentile
from workbench.trace.events import Event, Finished, Prefilled, Stepped

PromptAndOutput = tuple[int, int]  # prompt tokens, output tokens
BATCHES, DEPTHS = (1, 16), (0, 4096)
MAX_STEP_TOKENS = 512  # maximum tokens of a step
PAGE_SIZE = 64


@dataclass(frozen=True)
class BenchCase:
    """One case to time, with `batch` sequences at once; `kind` says which tokens are timed.

    `prefill` times the `prompt` tokens after `depth` others; `decode` times `output` tokens after both. `mixed` times
    requests of mixed `lengths` from the first to the last token."""

    kind: Literal["prefill", "decode", "mixed"]
    batch: int
    depth: int = 0
    prompt: int = 512
    output: int = 128
    lengths: tuple[PromptAndOutput, ...] = ()

    @property
    def longest(self) -> int:
        """Return the number of tokens of the longest sequence."""
        if self.kind == "mixed":
            return max(prompt + output for prompt, output in self.lengths)
        return self.depth + self.prompt + (self.output if self.kind == "decode" else 1)


@dataclass(frozen=True)
class BenchRepetition:
    """The figures of one repetition of a case.

    It holds the tokens with their wall and forward seconds, the minimum FLOPs and bytes of these steps, bytes of cache
    in use, and the number of graphs compiled during it."""

    tokens: int
    wall_seconds: float
    forward_seconds: float
    flops: float
    bytes: float
    kv_bytes: int
    compiles: int
    step_seconds: tuple[float, ...]
    kernel_seconds: float | None = None  # part of the forward seconds in compiled code; None if not reported


def run_repetition(runner: Runner, case: BenchCase, seed: int) -> BenchRepetition:
    """Run a case once, with prompts drawn from `seed`. Raises WorkbenchError if a request does not run."""
    before, steps = runner.core.executor.compiles, list(_measured_steps(runner, case, seed))
    kernels = [step.kernel_seconds for step in steps if step.kernel_seconds is not None]
    return BenchRepetition(
        tokens=_tokens(case, steps),
        wall_seconds=math.fsum(step.wall_seconds for step in steps),
        forward_seconds=math.fsum(step.forward_seconds for step in steps),
        flops=math.fsum(step.predicted_flops for step in steps),
        bytes=math.fsum(step.predicted_bytes for step in steps),
        kv_bytes=max(step.kv_bytes for step in steps),
        compiles=runner.core.executor.compiles - before,
        step_seconds=tuple(step.wall_seconds for step in steps),
        kernel_seconds=math.fsum(kernels) if len(kernels) == len(steps) else None,
    )


def max_sequence_length(case: BenchCase, budget: int) -> int:
    """Return the maximum length of a sequence while a case runs. In decode, the first sequences keep decoding until the
    last one joins, so they become longer."""
    return case.longest + (_waiting_steps(case, budget) if case.kind == "decode" else 0)


def _tokens(case: BenchCase, steps: Sequence[Stepped]) -> int:
    if case.kind == "mixed":  # a prefill step yields the first token of a request
        return sum(output for _, output in case.lengths)
    return sum(step.prefill_tokens if case.kind == "prefill" else step.decode_tokens for step in steps)


def _measured_steps(runner: Runner, case: BenchCase, seed: int) -> Iterator[Stepped]:
    """Yield the measured steps: prefill steps from `depth` on, `output` steps that decode the whole batch, or all
    steps."""
    counted = 0
    for step, prefilled in _steps(runner, _requests(runner, case, seed)):
        if case.kind == "prefill":
            counts = bool(prefilled) and all(each.computed - each.tokens >= case.depth for each in prefilled)
        else:
            counts = case.kind == "mixed" or (step.phase == "decode" and step.decode_tokens == case.batch)
        if counts:
            counted += 1
            yield step
        if case.kind == "decode" and counted == case.output:
            return
    if not counted or case.kind == "decode":
        raise WorkbenchError(f"{case.kind} at depth {case.depth}, batch {case.batch}: the requests ended too soon")


def _steps(runner: Runner, requests: list[Request]) -> Iterator[tuple[Stepped, list[Prefilled]]]:
    """Yield each step with the prefills in it. Closing the iterator cancels the requests that still run."""
    prefilled: list[Prefilled] = []
    events: Iterator[Event] = runner.stream(requests)
    try:
        for event in events:
            if isinstance(event, Prefilled):
                prefilled.append(event)
            elif isinstance(event, Finished) and event.error:
                raise WorkbenchError(f"{event.request_id}: {event.error}")
            elif isinstance(event, Stepped):
                yield event, prefilled
                prefilled = []
    finally:
        events.close()  # type: ignore[attr-defined] (a generator)


def _requests(runner: Runner, case: BenchCase, seed: int) -> list[Request]:
    draw, vocab = random.Random(f"{case}/{seed}"), runner.model.spec.vocab_size
    waiting = _waiting_steps(case, runner.scheduler.limits.max_num_batched_tokens)
    lengths: Sequence[PromptAndOutput] = case.lengths
    if case.kind != "mixed":
        output = 1 if case.kind == "prefill" else case.output + waiting
        lengths = ((case.depth + case.prompt, output),) * case.batch
    return [
        Request(
            f"bench-{seed}-{index}",
            random_token_ids(draw, vocab, prompt),
            SamplingParameters(temperature=0.0, max_tokens=output, ignore_eos=True),
        )
        for index, (prompt, output) in enumerate(lengths)
    ]


def _waiting_steps(case: BenchCase, budget: int) -> int:
    """Return an upper bound of the steps until the last sequence is prefilled: each step prefills `budget` tokens less
    the decodes."""
    room = max(1, budget - case.batch)
    return case.batch * -(-(case.depth + case.prompt) // room) + 1


def bench_row(
    case: BenchCase, repetitions: Sequence[BenchRepetition], runner: Runner, ceilings: MachineCeilings
) -> dict[str, Any]:
    """Build one row of the table from the repetitions of a case.

    Rates are per wall time of the steps; fractions of ceilings are per forward time. `outside_forward_share` is the
    fraction of the wall time spent in scheduling, sampling and events. `outside_kernels_share` adds the Python part of
    the forward pass (packing, copies, checks); it is None where the compiled code does not report kernel time."""
    read = ceilings.read_ceilings[0]
    gemm = ceilings.gemm_ceiling(str(runner.model.dtype).removeprefix("torch."))
    rates = [each.tokens / each.wall_seconds for each in repetitions]
    outside = [1 - each.kernel_seconds / each.wall_seconds for each in repetitions if each.kernel_seconds is not None]
    roofline = [max(each.flops / gemm.value, each.bytes / read.value) / each.forward_seconds for each in repetitions]
    return {
        **_name(case),
        "status": "ok",
        "reason": "graphs were compiled while it was timed" if any(each.compiles for each in repetitions) else "",
        "tokens_per_s": median(rates),
        "spread": [min(rates), max(rates)],
        "repetitions": len(repetitions),
        "step_seconds": _percentiles([step for each in repetitions for step in each.step_seconds]),
        "bytes_per_s": median(each.bytes / each.forward_seconds for each in repetitions),
        "flops_per_s": median(each.flops / each.forward_seconds for each in repetitions),
        "share_of_read_ceiling": median(each.bytes / each.forward_seconds / read.value for each in repetitions),
        "share_of_gemm_ceiling": median(each.flops / each.forward_seconds / gemm.value for each in repetitions),
        "share_of_roofline": median(roofline),
        "outside_forward_share": median(1 - each.forward_seconds / each.wall_seconds for each in repetitions),
        "outside_kernels_share": median(outside) if len(outside) == len(repetitions) else None,
        "read_ceiling_bytes_per_s": read.value,
        "read_level": read.level,
        "gemm_ceiling_flops_per_s": gemm.value,
        "gemm_dtype": gemm.dtype,
        "cache_bytes": max(each.kv_bytes for each in repetitions),
        "weight_bytes": runner.model.weight_bytes,
    }


def skipped_row(case: BenchCase, reason: str) -> dict[str, Any]:
    return {**_name(case), "status": "not run", "reason": reason}


def _name(case: BenchCase) -> dict[str, Any]:
    if case.kind == "mixed":
        prompt, output = (sum(lengths) for lengths in zip(*case.lengths, strict=True))
        return {"work": f"mixed {case.batch}", "batch": case.batch, "depth": 0, "prompt": prompt, "output": output}
    tokens = case.prompt if case.kind == "prefill" else case.output
    return {
        "work": f"{case.kind} {tokens}",
        "batch": case.batch,
        "depth": case.depth,
        "prompt": case.prompt,
        "output": case.output,
    }


def _percentiles(values: Sequence[float]) -> dict[str, float | None]:
    return {f"p{q}": percentile(values, q) for q in (10, 50, 90)}


def standard_cases(
    batches: Sequence[int] = BATCHES, depths: Sequence[int] = DEPTHS, prompt: int = 512, output: int = 128
) -> tuple[BenchCase, ...]:
    places = [(batch, depth) for batch in batches for depth in depths]
    return tuple(BenchCase(kind, *place, prompt, output) for place in places for kind in ("prefill", "decode"))


def mixed_lengths(
    count: int = 16, prompts: tuple[int, int] = (32, 512), outputs: tuple[int, int] = (32, 128),
    prompt_tokens: int = 4352, output_tokens: int = 1274, seed: int = 0,
) -> tuple[PromptAndOutput, ...]:  # fmt: skip
    """Return the prompt and output lengths of `count` requests, drawn from the given ranges, which sum to the given
    totals."""
    draw = random.Random(seed)
    return tuple(
        zip(_drawn(draw, count, prompts, prompt_tokens), _drawn(draw, count, outputs, output_tokens), strict=True)
    )


def _drawn(draw: random.Random, count: int, ends: tuple[int, int], total: int) -> list[int]:
    least, most = ends
    if not count * least <= total <= count * most:
        raise WorkbenchError(f"{count} lengths between {least} and {most} cannot sum to {total}")
    lengths = [draw.randint(least, most) for _ in range(count)]
    while (missing := total - sum(lengths)) != 0:
        index = draw.randrange(count)
        lengths[index] = min(most, max(least, lengths[index] + missing))
    return lengths


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
        model: A folder, a GGUF file, a model's name, or `shape:NAME` with random weights.
        cases: What to time; None is `standard_cases()`.
        settings: Further arguments of `workbench.load`: dtype, backend, weights, seed.
        threads: Intra-operator threads of torch; None keeps the current number.
        repetitions: Timed repetitions of each case, at least 1.
        memory: Also measure memory in decode, in a separate process for each batch size.
        cold: Also time a cold and a warm start, in separate processes.
        on_progress: Called with one line of text before each measurement.

    Raises:
        WorkbenchError: For fewer than one repetition, or depths that are not multiples of a prefill step.
    """
    if repetitions < 1:
        raise WorkbenchError(f"repetitions {repetitions}: must be at least 1")
    cases, settings = tuple(standard_cases() if cases is None else cases), {"model": model, **(settings or {})}
    EngineConfig.build(**settings)  # refuses invalid settings, and registers a custom family
    before, machine_environment = cpu_times(), environment()
    with intra_op_threads(threads) as used:
        spec, budget = _spec(model), step_token_budget(cases)
        possible = [work for work in cases if max_sequence_length(work, budget) <= spec.max_position_embeddings]
        decodes = [work for work in possible if work.kind == "decode" and not work.depth] if memory else []
        on_progress = StageCounter(on_progress, 2 + (repetitions + 1) * len(possible) + len(decodes) + cold)
        on_progress("loading")
        runner = load(
            **settings, max_num_batched_tokens=budget, page_size=PAGE_SIZE, **_runner_limits(possible, budget),
            report=on_progress,
        )  # fmt: skip
        found: dict[BenchCase, list[BenchRepetition]] = {work: [] for work in possible}
        for turn, work in interleaved(
            possible, repetitions, on_progress, lambda work: f"{work.kind} {work.batch} at {work.depth}"
        ):
            figures = run_repetition(runner, work, turn)
            found[work] += [figures] if turn else []
        busy = others_cpu_share(before)
        on_progress("measuring this machine's ceilings: read bandwidth and matrix products")
        rows = [
            _row(work, found[work], runner, used)
            if work in found
            else skipped_row(
                work,
                f"{max_sequence_length(work, budget)} tokens, the model's context is {spec.max_position_embeddings}",
            )
            for work in cases
        ]
        record = {
            "question": "How fast is this model on this machine, and how close to its limits?",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "model": {"name": model, "parameters": spec.num_parameters, "weight_bytes": runner.model.weight_bytes},
            "settings": {
                **settings,
                "weights": runner.model.format.blocks.codes,
                "threads": used,
                "repetitions": repetitions,
                "backend_used": str(runner.core.backends),
            },
            "backend_reason": runner.core.backends.reason,
            "artifacts": dict(runner.core.executor.artifacts),
            "rows": rows,
            "memory": [],
            "cold_start": None,
            "others_cpu_share": busy,
            "environment": machine_environment,
        }
    del runner  # free its memory before other processes measure theirs
    for work in decodes:
        on_progress(f"memory in decode, batch {work.batch}")
        record["memory"].append(memory_in_decode(settings, used, work.batch, work.prompt, work.output))
    if cold:
        on_progress("cold start")
        record["cold_start"] = cold_start(settings, used)
    return record


def step_token_budget(cases: Sequence[BenchCase]) -> int:
    """Return the token budget of a step, chosen so that a prefill step begins at every measured depth.

    Raises WorkbenchError if the depths, prompts and batch sizes do not allow it."""
    budget = min([MAX_STEP_TOKENS, *(work.prompt for work in cases if work.kind != "mixed")])
    for work in cases:
        if work.depth % budget:
            raise WorkbenchError(f"depth {work.depth}: must be a multiple of {budget}, the tokens of a step of prefill")
        if work.batch >= budget:
            raise WorkbenchError(f"batch {work.batch}: must be below {budget}, the tokens of a step")
    return budget


def _row(case: BenchCase, found: Sequence[BenchRepetition], runner: Runner, threads: int) -> dict[str, Any]:
    """Return a row. Ceilings that the case exceeds are measured again; if exceeded again, the row states the error."""
    row = bench_row(case, found, runner, _ceilings(runner, found, threads))
    if bound_fault(case.kind, row["share_of_roofline"]):
        row = bench_row(case, found, runner, _ceilings(runner, found, threads, refresh=True))
    faults = (row["reason"], bound_fault(case.kind, row["share_of_roofline"]))
    return {**row, "reason": "; ".join(filter(None, faults))}


def _ceilings(
    runner: Runner, figures: Sequence[BenchRepetition], threads: int, refresh: bool = False
) -> MachineCeilings:
    """Return the machine's ceilings at the working set of a step of this case."""
    name = str(runner.model.dtype).removeprefix("torch.")
    size = runner.model.weight_bytes + max(each.kv_bytes for each in figures)
    compiled = backend_problems()[Backend.INDUCTOR] is None
    return ceilings_for(size, threads=threads, dtypes=gemm_dtypes(name), compiled=compiled, refresh=refresh)


def _spec(model: str) -> ModelSpec:
    folder = model_folder(model)
    return named_shape(model.removeprefix(SHAPE_PREFIX)) if folder is None else read_spec(folder)


def _runner_limits(cases: Sequence[BenchCase], budget: int) -> dict[str, Any]:
    """Return the runner's limits that depend on the cases: `max_num_seqs` and `pages`."""
    pages = [
        sum(pages_for(prompt + output, PAGE_SIZE) for prompt, output in work.lengths)
        or work.batch * pages_for(max_sequence_length(work, budget), PAGE_SIZE)
        for work in cases
    ]
    return {"max_num_seqs": max((work.batch for work in cases), default=1), "pages": max(pages, default=1)}
