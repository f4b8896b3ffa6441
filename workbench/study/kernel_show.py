"""What a lane makes of a case, in figures: stages and their sizes, work predicted and time measured."""

from __future__ import annotations

from typing import Any

from compiled_kernels.cases import Case, Suite
from compiled_kernels.lanes import Lane
from compiled_kernels.measure import measure
from compiled_kernels.stages import Stages
from workbench.study.kernel_bench import times


def overview(suite: Suite, case: Case, lane: Lane, found: Stages, budget_seconds: float = 0.2) -> dict[str, Any]:
    """`stages` with the lines and characters of each, `predicted` bytes and FLOPs (the least the case needs), what
    the generated code moves where the compiler accounts for it, and `measured` time and rates, or why there is none."""
    measured = measure(suite, case, (lane,), budget_seconds)
    timing = measured.timings.get(lane)
    fusion = found.stages.get("fusion")
    return {
        "stages": sizes(found),
        "predicted": {"bytes": case.work.bytes, "flops": case.work.flops},
        "generated": {"bytes": sum(each["bytes"] for each in fusion.data["kernels"])} if fusion else None,
        "measured": times(case, measured, timing) if timing else None,
        "not_measured": "" if timing else measured.refused[lane],
    }


def sizes(found: Stages) -> list[dict[str, Any]]:
    """Lines and characters of each stage, in order."""
    return [
        {"stage": name, "lines": stage.text.count("\n") + 1, "characters": len(stage.text)}
        for name, stage in found.stages.items()
    ]
