"""Select the backends of a model, cache and settings for this machine, before anything is loaded or compiled, or refuse
them with the reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from compiled_kernels import Backend, backend_problems
from compiled_kernels.backends import AUTO_BACKEND
from compiled_kernels.capabilities import batch_variance, known_gap
from compiled_kernels.paged_attention import unsupported_reason
from compiled_kernels.quantized_attention.quantize import SCALED_FORMATS
from workbench.errors import WorkbenchError, nearest
from workbench.executors.mlir import unsupported_model_reason, unsupported_store_reason
from workbench.kv_cache.format import KVCacheSpec
from workbench.model.custom import build_mask, build_score
from workbench.model.quantized import WeightFormat
from workbench.model.spec import AnyAttentionSpec, ModelSpec
from workbench.model.transformer import DENSE

_OFF_CPU = ", ".join((Backend.TRITON, Backend.INDUCTOR, Backend.EAGER))
STEP_OPERATOR = "decode_step"  # what a backend computes whole steps with


@dataclass(frozen=True)
class Backends:
    """The backends of a model: `decode` for steps of one token per sequence, `blocks` for other steps, and their
    attention.

    What is not `checked` has compiled nothing here yet: under `auto` the first long prefill then finds out whether
    `blocks` fails here (see `FallbackExecutor`).
    """

    decode: Backend
    blocks: Backend
    attention: Backend
    reason: str
    checked: bool = True

    @classmethod
    def uniform(cls, backend: Backend, reason: str) -> Backends:
        return cls(backend, backend, backend, reason)

    def fall_back_to_eager(self, why: str) -> Backends:
        """Return the same with eager blocks and attention, after blocks failed."""
        return replace(
            self, blocks=Backend.EAGER, attention=Backend.EAGER, reason=f"{self.reason}; {why}", checked=True
        )

    def __str__(self) -> str:
        if self.decode is self.blocks is self.attention:
            return str(self.decode)
        attention = "" if self.attention is self.blocks else f", its attention: {self.attention}"
        return f"{self.decode} (prefill: {self.blocks}{attention})"


def resolve_backends(name: str, device: str = "cpu") -> Backends:
    """Resolve `name` (`auto` or a backend) on this machine for a model on `device` (cpu, cuda).

    Where several backends could decode, `auto` names the one that as a rule is fastest; autotuning compares them for
    one model.

    Raises:
        WorkbenchError: for a backend that is unknown or does not work here.
    """
    problems = dict(backend_problems())
    if device != "cpu":
        problems[Backend.MLIR] = f"it runs on the CPU, and device is {device!r}; there {_OFF_CPU} work"
    if name == AUTO_BACKEND:
        return _auto(problems, device)
    if name not in tuple(Backend):
        known = (AUTO_BACKEND, *Backend)
        raise WorkbenchError(f"unknown backend {name!r}{nearest(name, known)}; known here: {', '.join(known)}")
    if problem := problems[Backend(name)]:
        raise WorkbenchError(f"backend {name!r} does not work here: {problem}")
    return Backends.uniform(Backend(name), "asked for")


def _auto(problems: Mapping[Backend, str | None], device: str) -> Backends:
    if device == "cuda" and not problems[Backend.TRITON]:
        return Backends.uniform(Backend.TRITON, AUTO_BACKEND)
    blocks = Backend.EAGER if problems[Backend.INDUCTOR] else Backend.INDUCTOR
    reason = (
        f"auto: inductor does not work here: {problems[Backend.INDUCTOR]}"
        if problems[Backend.INDUCTOR]
        else AUTO_BACKEND
    )
    quick = blocks if problems[Backend.MLIR] else Backend.MLIR
    return Backends(quick, blocks, quick, reason)


def incompatible_settings(batch_invariant: bool, evicts: bool, speculates: bool) -> str:
    """Return why a runner cannot have all of these at once, or an empty string."""
    if evicts and batch_invariant:
        return "batch_invariant: not with cache.evict: what stays of a prompt depends on its chunks; leave one out"
    if evicts and speculates:
        return "speculate: not with cache.evict: what a policy of it weighs may fall; leave one out"
    return ""


def select_for_model(backends: Backends, spec: ModelSpec, auto: bool, format: WeightFormat = DENSE) -> Backends:
    """Restrict `backends` to what supports `spec` with weights and activations of `format`.

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
    """Return why `backend` has no products of this format, or None."""
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


def select_for_cache(
    backends: Backends,
    specs: tuple[KVCacheSpec, ...],
    page_size: int,
    cache_dtype: torch.dtype,
    model_dtype: torch.dtype,
    auto: bool,
) -> Backends:
    """Restrict `backends` to what supports a cache of these specs, of type `cache_dtype` where it is not quantized.

    Under `auto` an unsupported backend is replaced by the next one, and the reason says so.

    Raises:
        WorkbenchError: for an unsupported backend that was asked for, and for heads that a format does not fit.
    """
    for shape in specs:
        shape.page_formats(page_size)
    problems = {
        backend: problem
        for backend in Backend
        if (problem := unsupported_cache_reason(backend, specs, cache_dtype, model_dtype))
    }
    if not auto:
        if problem := problems.get(backends.blocks) or problems.get(backends.decode):
            raise WorkbenchError(f"backend {str(backends.blocks)!r} cannot carry out this cache: {problem}")
        return backends
    for role in ("decode", "attention"):
        backend = getattr(backends, role)
        if backend in problems and backend is not backends.blocks:
            backends = replace(backends, **{role: backends.blocks}, reason=f"auto: not {backend}: {problems[backend]}")
    return backends


def unsupported_cache_reason(
    backend: Backend, specs: tuple[KVCacheSpec, ...], cache_dtype: torch.dtype, model_dtype: torch.dtype
) -> str | None:
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


def select_batch_invariant(backends: Backends, requested: str, spec: ModelSpec, device: str) -> Backends:
    """Select the backend whose results depend on nothing but a request itself; `backends` is what `requested` means
    otherwise.

    Raises:
        WorkbenchError: if that cannot be kept.
    """
    chosen = Backend.MLIR if requested == AUTO_BACKEND else backends.decode
    if reason := batch_variance(STEP_OPERATOR, chosen):
        raise WorkbenchError(
            f"batch_invariant: backend {str(chosen)!r} cannot keep it: {reason}; backend 'mlir' keeps it"
        )
    if problem := backend_problems()[chosen]:
        raise WorkbenchError(
            f"batch_invariant: backend {str(chosen)!r} alone keeps it, and does not work here: {problem}"
        )
    if device != "cpu":
        raise WorkbenchError(
            f"batch_invariant: backend {str(chosen)!r} alone keeps it, on the CPU; device is {device!r}"
        )
    if problem := unsupported_model_reason(spec):
        raise WorkbenchError(f"batch_invariant: backend {str(chosen)!r} computes no step of {spec.name}: {problem}")
    return Backends.uniform(
        chosen, f"batch_invariant: {'of all backends this one keeps it' if requested == AUTO_BACKEND else 'asked for'}"
    )


def check_batch_invariant_cache(
    specs: tuple[KVCacheSpec, ...], cache_dtype: torch.dtype, model_dtype: torch.dtype
) -> None:
    """Refuse a cache, of type `cache_dtype` where it is not quantized, that the compiled step cannot hold
    (WorkbenchError)."""
    names = [str(dtype).removeprefix("torch.") for dtype in (cache_dtype, model_dtype)]
    if model_dtype not in (torch.float32, torch.bfloat16) or cache_dtype != model_dtype:
        message = f"{names[1]} weights and a {names[0]} cache"
        raise WorkbenchError(f"batch_invariant: steps are computed in float32 or bfloat16, one for both, not {message}")
    if problem := unsupported_store_reason(specs):
        raise WorkbenchError(f"batch_invariant: this cache cannot be kept so: {problem}")
