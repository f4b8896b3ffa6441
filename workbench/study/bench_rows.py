"""Rows of the model benchmark: medians over repetitions, their spread, and fractions of the machine's ceilings."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from workbench.engine.runner import Runner
from workbench.study.bench_works import BenchRepetition, BenchCase
from workbench.study.ceilings import MachineCeilings
from workbench.study.metrics import percentile


def bench_row(case: BenchCase, repetitions: Sequence[BenchRepetition], runner: Runner, ceilings: MachineCeilings) -> dict[str, Any]:
    """Build one row of the table from the repetitions of a case.

    Rates are per wall time of the steps; fractions of ceilings are per forward time. `outside_forward_share` is the
    fraction of the wall time spent in scheduling, sampling and events. `outside_kernels_share` adds the Python part of
    the forward pass (packing, copies, checks); it is None where the compiled code does not report kernel time."""
    read, gemm = ceilings.read_ceilings[0], ceilings.gemm_ceilings[0]
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
