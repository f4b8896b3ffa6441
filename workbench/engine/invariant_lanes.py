"""Select the backend for `batch_invariant`, or explain why there is none."""

from __future__ import annotations

import torch

from compiled_kernels import Backend, backend_problems
from compiled_kernels.invariance import batch_variance
from compiled_kernels.backends import AUTO_BACKEND
from workbench.cache.shapes import KVCacheSpec
from workbench.engine.lanes import Backends
from workbench.engine.mlir_step import unsupported_model_reason, unsupported_store_reason
from workbench.errors import WorkbenchError
from workbench.model.spec import ModelSpec

STEP_OPERATOR = "decode_step"  # what a backend computes whole steps with


def select_batch_invariant(backends: Backends, requested: str, spec: ModelSpec, device: str) -> Backends:
    """Select the backend whose results depend on nothing but a request itself; `backends` is what `requested` means
    otherwise.

    Raises:
        WorkbenchError: if that cannot be kept.
    """
    chosen = Backend.MLIR if requested == AUTO_BACKEND else backends.decode
    if reason := batch_variance(STEP_OPERATOR, chosen):
        raise WorkbenchError(f"batch_invariant: backend {str(chosen)!r} cannot keep it: {reason}; backend 'mlir' keeps it")
    if problem := backend_problems()[chosen]:
        raise WorkbenchError(f"batch_invariant: backend {str(chosen)!r} alone keeps it, and does not work here: {problem}")
    if device != "cpu":
        raise WorkbenchError(f"batch_invariant: backend {str(chosen)!r} alone keeps it, on the CPU; device is {device!r}")
    if problem := unsupported_model_reason(spec):
        raise WorkbenchError(f"batch_invariant: backend {str(chosen)!r} computes no step of {spec.name}: {problem}")
    return Backends.uniform(chosen, f"batch_invariant: {'of all backends this one keeps it' if requested == AUTO_BACKEND else 'asked for'}")


def check_batch_invariant_cache(specs: tuple[KVCacheSpec, ...], cache_dtype: torch.dtype, model_dtype: torch.dtype) -> None:
    """Refuse a cache, of type `cache_dtype` where it is not quantized, that the compiled step cannot hold
    (WorkbenchError)."""
    names = [str(dtype).removeprefix("torch.") for dtype in (cache_dtype, model_dtype)]
    if model_dtype not in (torch.float32, torch.bfloat16) or cache_dtype != model_dtype:
        message = f"{names[1]} weights and a {names[0]} cache"
        raise WorkbenchError(f"batch_invariant: steps are computed in float32 or bfloat16, one for both, not {message}")
    if problem := unsupported_store_reason(specs):
        raise WorkbenchError(f"batch_invariant: this cache cannot be kept so: {problem}")
