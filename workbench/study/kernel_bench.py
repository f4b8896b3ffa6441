"""Benchmark of operators on every backend, with the ceilings of this machine, as a record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import torch

from compiled_kernels.cases import Case, Suite, suite_of, suites
from compiled_kernels.check import device_of
from compiled_kernels.lanes import Lane
from compiled_kernels.measure import PAST_CACHES, Measurement, Timing, measure
from workbench.study.ceilings import Ceilings, ceilings_for
from workbench.study.environment import environment
from workbench.study.machine import cpu_times, last_level_cache, others_cpu_share
from workbench.study.measure_ceilings import thread_count

LEAST_READ = 2**20  # a read test of less times its own call, not the memory
RATED = ("float32", "bfloat16")


def timed_cases(operator: str | None = None) -> list[tuple[Suite, Case]]:
    """Return the cases that are benchmarks, of all operators or one. Raises LaneError for an unknown operator."""
    chosen = suites() if operator is None else (suite_of(operator),)
    return [(suite, case) for suite in chosen for case in suite.cases if case.timed]


def kernel_bench(
    cases: Sequence[tuple[Suite, Case]],
    lanes: Iterable[Lane] = tuple(Lane),
    threads: int | None = None,
    budget_seconds: float = 0.4,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Time `backends` on each case, and eager as the baseline, and return the record.

    Args:
        cases: Pairs of a suite and a case.
        backends: Backends to time.
        threads: Intra-operator threads; None keeps the present number.
        budget_seconds: Time for each backend of a case.
        on_progress: Called with one line of text before each case.
    """
    asked = tuple(lanes)
    before, surroundings, rows = cpu_times(), environment(), []
    with thread_count(threads) as used:
        for suite, case in cases:
            tell(f"{suite.operator} {case.name}")
            torch._dynamo.reset()  # what earlier cases compiled is done with
            started = cpu_times()
            found = _measured(suite, case, asked, budget_seconds)
            busy = others_cpu_share(started)
            ceilings = _ceilings(found, case, used)
            rows += [{**row, "others_cpu_share": busy} for row in rows_of(suite, case, found, asked, ceilings)]
    return {
        "question": "How near to this machine's limits is each operator on each lane?",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "threads": used,
        "others_cpu_share": others_cpu_share(before),
        "rows": rows,
        "environment": surroundings,
    }


def rows_of(
    suite: Suite, case: Case, found: Measurement, asked: Sequence[Lane], ceilings: Ceilings
) -> Iterator[dict[str, Any]]:
    """Yield one row for each backend: time, fraction of the binding roofline, ratio to eager, or the reason why there
    is none."""
    eager = found.timings.get(Lane.EAGER)
    for lane in asked:
        row: dict[str, Any] = {"operator": suite.operator, "lane": str(lane), "case": case.name}
        timing = found.timings.get(lane)
        if timing and device_of(lane) == "cuda":  # a GPU: the ceilings and the eager baseline are the CPU's
            yield {**row, "status": "ok", "reason": "on the GPU", **times(case, found, timing)}
        elif timing:
            yield {**row, "status": "ok", "reason": "", **_figures(case, found, timing, eager, ceilings)}
        else:
            yield {**row, "status": "not timed", "reason": found.refused.get(lane, "")}


def _measured(suite: Suite, case: Case, asked: tuple[Lane, ...], budget_seconds: float) -> Measurement:
    lanes = dict.fromkeys((Lane.EAGER, *asked))
    past_caches = max(PAST_CACHES, 4 * (last_level_cache() or 0))
    return measure(suite, case, lanes, budget_seconds, past_caches)


def _ceilings(found: Measurement, case: Case, threads: int) -> Ceilings:
    size = found.working_set_bytes * found.copies if found.data == "memory" else found.working_set_bytes
    return ceilings_for(max(size, LEAST_READ), threads=threads, dtypes=(_rated(case),), compiled=True)


def _rated(case: Case) -> str:
    name = str(case.arguments["dtype"]).removeprefix("torch.")
    return name if name in RATED else RATED[0]


def _figures(case: Case, found: Measurement, timing: Timing, eager: Timing | None, ceilings: Ceilings) -> dict:
    read, gemm = ceilings.reads[0], ceilings.gemm(_rated(case))
    moving, computing = case.work.bytes / read.value, case.work.flops / gemm.value
    return {
        **times(case, found, timing),
        "bound": "read" if moving >= computing else "gemm",
        "ceiling_bytes_per_s": read.value,
        "ceiling_flops_per_s": gemm.value,
        "predicted_seconds": max(moving, computing),
        "share_of_ceiling": max(moving, computing) / timing.seconds,
        "speedup_over_eager": eager.seconds / timing.seconds if eager else None,
    }


def times(case: Case, found: Measurement, timing: Timing) -> dict[str, Any]:
    """Return a backend's time, the memory level of the data, and the rates that follow from the case's minimum bytes
    and FLOPs."""
    return {
        "seconds": timing.seconds,
        "p10_seconds": timing.p10,
        "p90_seconds": timing.p90,
        "rounds": timing.rounds,
        "data": found.data,
        "copies": found.copies,
        "working_set_bytes": found.working_set_bytes,
        "bytes": case.work.bytes,
        "flops": case.work.flops,
        "bytes_per_s": case.work.bytes / timing.seconds,
        "flops_per_s": case.work.flops / timing.seconds,
    }
