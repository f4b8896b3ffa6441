"""Widgets: show and control a running model, a record or plain arrays in a notebook.

Each is one call and one value on a cell's last line, imported when first used.
"""

from __future__ import annotations

from typing import Any

_HOMES = {
    "AttentionView": ".attention.view",
    "Chat": ".chat.view",
    "Claims": ".claims.view",
    "Compare": ".compare.view",
    "Course": ".course.view",
    "Exercise": ".exercise.view",
    "ExpertMap": ".experts.view",
    "FleetView": ".fleet.view",
    "KernelView": ".kernels.view",
    "RunnerThread": "..engine.runner_thread",
    "between_steps": "..engine.runner_thread",
    "LiveBench": ".live_bench.view",
    "MemoryCalculator": ".memory.view",
    "ModelGraph": ".model_graph.view",
    "PageMap": ".pages.view",
    "Playground": ".playground.view",
    "projector": ".course.projector",
    "PromptView": ".prompt.view",
    "RooflinePoint": ".roofline.data",
    "Roofline": ".roofline.view",
    "SamplingExplorer": ".sampling.view",
    "ServerView": ".server.view",
    "SpeculationView": ".speculation.view",
    "SideBySide": ".side_by_side.view",
    "Timeline": ".timeline.view",
    "TokenPath": ".token_path.view",
    "TokenView": ".tokens.view",
}


def __dir__() -> list[str]:
    return list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"workbench.widgets has no {name!r}; it has {', '.join(_HOMES)}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name], __name__), name)
