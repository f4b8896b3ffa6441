"""Select backends that support a model's attention, before anything is loaded or compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from compiled_kernels import Lane
from compiled_kernels.gaps import known_gap
from compiled_kernels.paged_attention import refusal
from workbench.engine.lanes import Lanes
from workbench.engine.mlir_step import step_problem
from workbench.errors import WorkbenchError
from workbench.model.own_parts import mask_of, score_of
from workbench.model.quantized import WeightFormat
from workbench.model.spec import AnyAttention, ModelSpec
from workbench.model.transformer import DENSE


def fitted(lanes: Lanes, spec: ModelSpec, auto: bool, format: WeightFormat = DENSE) -> Lanes:
    """`lanes` as far as they can carry out `spec` with weights and activations of `format`.

    Under `auto` an unsupported backend is replaced by the next one, and the reason says so.

    Raises:
        WorkbenchError: for an unsupported backend that was asked for.
    """
    if not auto:
        # Without a step the lane mlir decodes by the blocks' operators, which are its own too.
        if problem := _format_problem(lanes.blocks, format) or _blocks_problem(lanes.blocks, spec):
            raise WorkbenchError(f"lane {str(lanes.blocks)!r} cannot carry out this model: {problem}")
        return lanes
    if problem := _format_problem(lanes.blocks, format) or _blocks_problem(lanes.blocks, spec):
        return Lanes.one(Lane.EAGER, f"auto: not {lanes.blocks}: {problem}")
    if lanes.reads is not lanes.blocks and (problem := _blocks_problem(lanes.reads, spec)):
        lanes = replace(lanes, reads=lanes.blocks, reason=f"auto: not {lanes.reads}: {problem}")
    if lanes.decode is Lane.MLIR and (problem := step_problem(spec)):
        lanes = replace(lanes, decode=lanes.blocks, reason=f"auto: not mlir: {problem}")
    return lanes


def _format_problem(lane: Lane, format: WeightFormat) -> str | None:
    """Why `lane` has no products of this format; None where it has."""
    if format.activations == "int8" and (gap := known_gap("linear_w8a8", lane, "")):
        return f"linear_w8a8 (activations: int8) has no lane {lane}: {gap.reason}"
    return None


def _blocks_problem(lane: Lane, spec: ModelSpec) -> str | None:
    """Return why `lane` does not support some layer; None if it supports all."""
    first = {kind: index for index, kind in reversed(list(enumerate(spec.layers)))}
    for kind, index in sorted(first.items(), key=lambda item: item[1]):
        if kind.experts is not None and (gap := known_gap("expert_linear", lane, "")):
            return f"layer {index}: a mixture of experts has no lane {lane}: {gap.reason}"
        if problem := _problem(lane, kind.attention):
            return f"layer {index}: {problem}"
    return None


def _problem(lane: Lane, attention: AnyAttention) -> str | None:
    mask, score = mask_of(attention), score_of(attention)
    if problem := refusal(lane, mask, score):
        return problem
    if lane is not Lane.INDUCTOR:
        return None
    at = torch.arange(4)
    if attention.mask is not None and (problem := _untraced(mask, at[:, None], at[None])):
        return f"mask {attention.mask.path} cannot be traced: {problem}"
    rows = torch.zeros(2, 4, 4), torch.arange(2)[:, None, None], at[None, :, None], at[None, None]
    if attention.score is not None and score is not None and (problem := _untraced(score, *rows)):
        return f"score {attention.score.path} cannot be traced: {problem}"
    return None


def _untraced(function: Callable[..., Any], *inputs: torch.Tensor) -> str | None:
    """Return why torch.compile cannot trace `function`; None if it can."""

    def call(*inputs: torch.Tensor) -> torch.Tensor:
        return function(*inputs)

    try:
        torch.compile(call, backend="eager", fullgraph=True)(*inputs)
    except Exception as error:  # whatever the compiler or the user's function throws
        return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return None
