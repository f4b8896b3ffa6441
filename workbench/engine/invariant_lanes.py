"""Select the backend for `batch_invariant`, or explain why there is none."""

from __future__ import annotations

import torch

from compiled_kernels import Lane, lane_problems
from compiled_kernels.invariance import variance
from compiled_kernels.lanes import AUTO
from workbench.cache.shapes import CacheShape
from workbench.engine.lanes import Lanes
from workbench.engine.mlir_step import step_problem, store_problem
from workbench.errors import WorkbenchError
from workbench.model.spec import ModelSpec

STEP = "decode_step"  # what a lane computes whole steps with


def invariant(lanes: Lanes, asked: str, spec: ModelSpec, device: str) -> Lanes:
    """Select the backend whose results depend on nothing but a request itself; `backends` is what `requested` means
    otherwise.

    Raises:
        WorkbenchError: if that cannot be kept.
    """
    chosen = Lane.MLIR if asked == AUTO else lanes.decode
    if reason := variance(STEP, chosen):
        raise WorkbenchError(f"batch_invariant: lane {str(chosen)!r} cannot keep it: {reason}; lane 'mlir' keeps it")
    if problem := lane_problems()[chosen]:
        raise WorkbenchError(f"batch_invariant: lane {str(chosen)!r} alone keeps it, and does not work here: {problem}")
    if device != "cpu":
        raise WorkbenchError(f"batch_invariant: lane {str(chosen)!r} alone keeps it, on the CPU; device is {device!r}")
    if problem := step_problem(spec):
        raise WorkbenchError(f"batch_invariant: lane {str(chosen)!r} computes no step of {spec.name}: {problem}")
    return Lanes.one(chosen, f"batch_invariant: {'of all lanes this one keeps it' if asked == AUTO else 'asked for'}")


def check_cache(shapes: tuple[CacheShape, ...], kept: torch.dtype, model: torch.dtype) -> None:
    """Refuse a cache, of type `cache_dtype` where it is not quantized, that the compiled step cannot hold
    (WorkbenchError)."""
    names = [str(dtype).removeprefix("torch.") for dtype in (kept, model)]
    if model not in (torch.float32, torch.bfloat16) or kept != model:
        told = f"{names[1]} weights and a {names[0]} cache"
        raise WorkbenchError(f"batch_invariant: steps are computed in float32 or bfloat16, one for both, not {told}")
    if problem := store_problem(shapes):
        raise WorkbenchError(f"batch_invariant: this cache cannot be kept so: {problem}")
