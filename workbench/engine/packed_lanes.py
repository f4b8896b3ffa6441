"""Select backends that support a quantized cache, before anything is loaded or compiled."""

from __future__ import annotations

from dataclasses import replace

import torch

from compiled_kernels import Lane
from compiled_kernels.quantized_attention.packed import SCALED
from workbench.cache.shapes import CacheShape
from workbench.engine.lanes import Lanes
from workbench.errors import WorkbenchError


def fitted_to(
    lanes: Lanes, shapes: tuple[CacheShape, ...], page_size: int, kept: torch.dtype, model: torch.dtype, auto: bool
) -> Lanes:
    """Restrict `backends` to what supports a cache of these specs, of type `cache_dtype` where it is not quantized.

    Under `auto` an unsupported backend is replaced by the next one, and the reason says so.

    Raises:
        WorkbenchError: for an unsupported backend that was asked for, and for heads that a format does not fit.
    """
    for shape in shapes:
        shape.page_formats(page_size)
    problems = {lane: problem for lane in Lane if (problem := problem_of(lane, shapes, kept, model))}
    if not auto:
        if problem := problems.get(lanes.blocks) or problems.get(lanes.decode):
            raise WorkbenchError(f"lane {str(lanes.blocks)!r} cannot carry out this cache: {problem}")
        return lanes
    for role in ("decode", "reads"):
        lane = getattr(lanes, role)
        if lane in problems and lane is not lanes.blocks:
            lanes = replace(lanes, **{role: lanes.blocks}, reason=f"auto: not {lane}: {problems[lane]}")
    return lanes


def problem_of(lane: Lane, shapes: tuple[CacheShape, ...], kept: torch.dtype, model: torch.dtype) -> str | None:
    """Return why `backend` cannot write and read a cache of these specs; None if it can."""
    if lane is Lane.MLIR and kept is not model:
        return f"it wants the cache in the model's {_name(model)}, not in {_name(kept)}"
    for layer, shape in enumerate(shapes):
        kinds = shape.format.kinds
        if shape.format.packed and lane is Lane.MLIR and not set(kinds) <= set(SCALED):
            return f"layer {layer}: it reads keys and values that are both packed, not {shape.format}; others do"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
