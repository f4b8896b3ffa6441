"""Select backends that support a quantized cache, before anything is loaded or compiled."""

from __future__ import annotations

from dataclasses import replace

import torch

from compiled_kernels import Backend
from compiled_kernels.quantized_attention.packed import SCALED_FORMATS
from workbench.cache.shapes import KVCacheSpec
from workbench.engine.lanes import Backends
from workbench.errors import WorkbenchError


def select_for_cache(
    backends: Backends, specs: tuple[KVCacheSpec, ...], page_size: int, cache_dtype: torch.dtype, model_dtype: torch.dtype, auto: bool
) -> Backends:
    """Restrict `backends` to what supports a cache of these specs, of type `cache_dtype` where it is not quantized.

    Under `auto` an unsupported backend is replaced by the next one, and the reason says so.

    Raises:
        WorkbenchError: for an unsupported backend that was asked for, and for heads that a format does not fit.
    """
    for shape in specs:
        shape.page_formats(page_size)
    problems = {backend: problem for backend in Backend if (problem := unsupported_cache_reason(backend, specs, cache_dtype, model_dtype))}
    if not auto:
        if problem := problems.get(backends.blocks) or problems.get(backends.decode):
            raise WorkbenchError(f"backend {str(backends.blocks)!r} cannot carry out this cache: {problem}")
        return backends
    for role in ("decode", "attention"):
        backend = getattr(backends, role)
        if backend in problems and backend is not backends.blocks:
            backends = replace(backends, **{role: backends.blocks}, reason=f"auto: not {backend}: {problems[backend]}")
    return backends


def unsupported_cache_reason(backend: Backend, specs: tuple[KVCacheSpec, ...], cache_dtype: torch.dtype, model_dtype: torch.dtype) -> str | None:
    """Return why `backend` cannot write and read a cache of these specs; None if it can."""
    if backend is Backend.MLIR and cache_dtype is not model_dtype:
        return f"it wants the cache in the model's {_name(model_dtype)}, not in {_name(cache_dtype)}"
    for layer, shape in enumerate(specs):
        kinds = shape.format.key_value_formats
        if shape.format.quantized and backend is Backend.MLIR and not set(kinds) <= set(SCALED_FORMATS):
            return f"layer {layer}: it reads keys and values that are both quantized, not {shape.format}; others do"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
