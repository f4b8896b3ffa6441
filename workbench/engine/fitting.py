"""Select backends that support a model's attention, before anything is loaded or compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from compiled_kernels import Backend
from compiled_kernels.gaps import known_gap
from compiled_kernels.paged_attention import unsupported_reason
from workbench.engine.lanes import Backends
from workbench.engine.mlir_step import unsupported_model_reason
from workbench.errors import WorkbenchError
from workbench.model.own_parts import build_mask, build_score
from workbench.model.quantized import WeightFormat
from workbench.model.spec import AnyAttentionSpec, ModelSpec
from workbench.model.transformer import DENSE


def select_for_model(backends: Backends, spec: ModelSpec, auto: bool, format: WeightFormat = DENSE) -> Backends:
    """`backends` as far as they can carry out `spec` with weights and activations of `format`.

    Under `auto` an unsupported backend is replaced by the next one, and the reason says so.

    Raises:
        WorkbenchError: for an unsupported backend that was asked for.
    """
    if not auto:
        # Without a step the backend mlir decodes by the blocks' operators, which are its own too.
        if problem := _format_problem(backends.blocks, format) or _blocks_problem(backends.blocks, spec):
            raise WorkbenchError(f"backend {str(backends.blocks)!r} cannot carry out this model: {problem}")
        return backends
    if problem := _format_problem(backends.blocks, format) or _blocks_problem(backends.blocks, spec):
        return Backends.uniform(Backend.EAGER, f"auto: not {backends.blocks}: {problem}")
    if backends.attention is not backends.blocks and (problem := _blocks_problem(backends.attention, spec)):
        backends = replace(backends, attention=backends.blocks, reason=f"auto: not {backends.attention}: {problem}")
    if backends.decode is Backend.MLIR and (problem := unsupported_model_reason(spec)):
        backends = replace(backends, decode=backends.blocks, reason=f"auto: not mlir: {problem}")
    return backends


def _format_problem(backend: Backend, format: WeightFormat) -> str | None:
    """Why `backend` has no products of this format; None where it has."""
    if format.activations == "int8" and (gap := known_gap("linear_w8a8", backend, "")):
        return f"linear_w8a8 (activations: int8) has no backend {backend}: {gap.reason}"
    return None


def _blocks_problem(backend: Backend, spec: ModelSpec) -> str | None:
    """Return why `backend` does not support some layer; None if it supports all."""
    first = {kind: index for index, kind in reversed(list(enumerate(spec.layers)))}
    for kind, index in sorted(first.items(), key=lambda item: item[1]):
        if kind.experts is not None and (gap := known_gap("expert_linear", backend, "")):
            return f"layer {index}: a mixture of experts has no backend {backend}: {gap.reason}"
        if problem := _problem(backend, kind.attention):
            return f"layer {index}: {problem}"
    return None


def _problem(backend: Backend, attention: AnyAttentionSpec) -> str | None:
    mask, score = build_mask(attention), build_score(attention)
    if problem := unsupported_reason(backend, mask, score):
        return problem
    if backend is not Backend.INDUCTOR:
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
