"""Compilation stages of a case on one backend, with predicted work and measured time."""

from __future__ import annotations

from typing import Any

from compiled_kernels.cases import Case, Suite
from compiled_kernels.backends import Backend
from compiled_kernels.measure import measure
from compiled_kernels.stages import CompilerStages
from workbench.study.kernel_bench import timing_figures


def stages_overview(suite: Suite, case: Case, backend: Backend, stages: CompilerStages, budget_seconds: float = 0.2) -> dict[str, Any]:
    """Summarize a case on one backend.

    Returns:
        `stages`: lines and characters of each stage. `predicted`: minimum bytes and FLOPs. `generated`: the bytes that
        the generated code moves, where the compiler reports them. `measured`: time and rates, or the reason why there
        are none.
    """
    measured = measure(suite, case, (backend,), budget_seconds)
    timing = measured.timings.get(backend)
    fusion = stages.stages.get("fusion")
    return {
        "stages": stage_sizes(stages),
        "predicted": {"bytes": case.cost.bytes, "flops": case.cost.flops},
        "generated": {"bytes": sum(each["bytes"] for each in fusion.data["kernels"])} if fusion else None,
        "measured": timing_figures(case, measured, timing) if timing else None,
        "not_measured": "" if timing else measured.refused[backend],
    }


def stage_sizes(stages: CompilerStages) -> list[dict[str, Any]]:
    """Return the lines and characters of each stage, in order."""
    return [
        {"stage": name, "lines": stage.text.count("\n") + 1, "characters": len(stage.text)}
        for name, stage in stages.stages.items()
    ]
