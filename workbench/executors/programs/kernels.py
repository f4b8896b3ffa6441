"""Describe the compiled functions of a step, and the operators in each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

AS_WRITTEN = "as written: each operator is a separate call"
STEP_SIDES = ("before", "write", "attend", "after", "head")


@dataclass(frozen=True)
class StepKernels:
    """The compiled functions of a step: a one-line `description`; for each part of the step (`STEP_SIDES`: before,
    write, attend, after, head) its backend, and the function that contains its operators. In a function's name
    `{layer}` stands for the layer's number; a part without a function calls each operator separately.
    """

    description: str
    backends: Mapping[str, str]
    functions: Mapping[str, str] = field(default_factory=dict)


def as_written(backend: str = "eager", description: str = AS_WRITTEN) -> StepKernels:
    return StepKernels(description, dict.fromkeys(STEP_SIDES, backend))


def unknown(what: str, backend: str) -> StepKernels:
    """Describe a step with unknown compiled functions."""
    return as_written(backend, f"how {what} groups operators is not known here; they stand as the modules are written")


def one_function(description: str, function: str, backend: str, *more: str) -> StepKernels:
    """Describe a step in which one function computes all parts and `more`; the name of a block's function has
    `{layer}`.
    """
    sides = (*STEP_SIDES, *more)
    functions = dict.fromkeys(sides, function)
    if function != "whole step":
        functions["head"] = "head"
    return StepKernels(description, dict.fromkeys(sides, backend), functions)


def two_sides(description: str, blocks: str, attention: str) -> StepKernels:
    """Describe a step with two compiled functions for each block, one before its attention and one after.

    Args:
        description: one line about the step.
        blocks: backend of the two functions, and of the model's head.
        attention: backend that writes keys and values, and attends.
    """
    backends = {**dict.fromkeys(STEP_SIDES, blocks), "write": attention, "attend": attention}
    functions = {"before": "before attention {layer}", "after": "after attention {layer}", "head": "head"}
    return StepKernels(description, backends, functions)
