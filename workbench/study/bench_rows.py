"""Rows of the model benchmark: medians over repetitions, their spread, and fractions of the machine's ceilings."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from workbench.engine.runner import Runner
from workbench.study.bench_works import Figures, Work
from workbench.study.ceilings import Ceilings
from workbench.study.metrics import percentile


def row_of(work: Work, figures: Sequence[Figures], runner: Runner, ceilings: Ceilings) -> dict[str, Any]:
    """Build one row of the table from the repetitions of a case.

    Rates are per wall time of the steps; fractions of ceilings are per forward time. `outside_forward_share` is the
    fraction of the wall time spent in scheduling, sampling and events. `outside_kernels_share` adds the Python part of
    the forward pass (packing, copies, checks); it is None where the compiled code does not report kernel time."""
    read, gemm = ceilings.reads[0], ceilings.gemms[0]
    rates = [each.tokens / each.wall_seconds for each in figures]
    outside = [1 - each.kernel_seconds / each.wall_seconds for each in figures if each.kernel_seconds is not None]
    roofline = [max(each.flops / gemm.value, each.bytes / read.value) / each.forward_seconds for each in figures]
    return {
        **_name(work),
        "status": "ok",
        "reason": "graphs were compiled while it was timed" if any(each.compiles for each in figures) else "",
        "tokens_per_s": median(rates),
        "spread": [min(rates), max(rates)],
        "repetitions": len(figures),
        "step_seconds": _percentiles([step for each in figures for step in each.step_seconds]),
        "bytes_per_s": median(each.bytes / each.forward_seconds for each in figures),
        "flops_per_s": median(each.flops / each.forward_seconds for each in figures),
        "share_of_read_ceiling": median(each.bytes / each.forward_seconds / read.value for each in figures),
        "share_of_gemm_ceiling": median(each.flops / each.forward_seconds / gemm.value for each in figures),
        "share_of_roofline": median(roofline),
        "outside_forward_share": median(1 - each.forward_seconds / each.wall_seconds for each in figures),
        "outside_kernels_share": median(outside) if len(outside) == len(figures) else None,
        "read_ceiling_bytes_per_s": read.value,
        "read_level": read.level,
        "gemm_ceiling_flops_per_s": gemm.value,
        "gemm_dtype": gemm.dtype,
        "cache_bytes": max(each.kv_bytes for each in figures),
        "weight_bytes": runner.model.weight_bytes,
    }


def refused(work: Work, reason: str) -> dict[str, Any]:
    return {**_name(work), "status": "not run", "reason": reason}


def _name(work: Work) -> dict[str, Any]:
    if work.kind == "mixed":
        prompt, output = (sum(lengths) for lengths in zip(*work.lengths, strict=True))
        return {"work": f"mixed {work.batch}", "batch": work.batch, "depth": 0, "prompt": prompt, "output": output}
    tokens = work.prompt if work.kind == "prefill" else work.output
    return {
        "work": f"{work.kind} {tokens}",
        "batch": work.batch,
        "depth": work.depth,
        "prompt": work.prompt,
        "output": work.output,
    }


def _percentiles(values: Sequence[float]) -> dict[str, float | None]:
    return {f"p{q}": percentile(values, q) for q in (10, 50, 90)}
