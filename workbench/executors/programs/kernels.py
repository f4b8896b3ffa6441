"""Describe which compiled functions carry a step out: each holds some operators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

AS_WRITTEN = "as written: each operator is a call of its own"
STEP_SIDES = ("before", "write", "attend", "after", "head")


@dataclass(frozen=True)
class StepKernels:
    """The way a step is carried out: `description` in a line, the backend of each side, and by side the function that
    has its operators. In the name of a function `{layer}` is the layer's number; a side without one has a call for
    each operator."""

    description: str
    backends: Mapping[str, str]
    functions: Mapping[str, str] = field(default_factory=dict)


def as_written(backend: str = "eager", description: str = AS_WRITTEN) -> StepKernels:
    return StepKernels(description, dict.fromkeys(STEP_SIDES, backend))


def unknown(what: str, backend: str) -> StepKernels:
    """Describe a step whose compiled functions nothing here knows."""
    return as_written(backend, f"how {what} groups operators is not known here; they stand as the modules are written")


def one_function(description: str, function: str, backend: str, *more: str) -> StepKernels:
    """Describe a step whose sides, and `more`, are one function; the name of a block's has `{layer}`."""
    sides = (*STEP_SIDES, *more)
    functions = dict.fromkeys(sides, function)
    if function != "whole step":
        functions["head"] = "head"
    return StepKernels(description, dict.fromkeys(sides, backend), functions)


def two_sides(description: str, blocks: str, attention: str) -> StepKernels:
    """Describe a step with a function for each side of a block's attention."""
    backends = {**dict.fromkeys(STEP_SIDES, blocks), "write": attention, "attend": attention}
    functions = {"before": "before attention {layer}", "after": "after attention {layer}", "head": "head"}
    return StepKernels(description, backends, functions)
