"""Attention of packed spans over keys and values that lie in pages."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from compiled_kernels.attention import SCHEMA, AttentionParameters, Mask, Score, Spans, flatten, unflatten
from compiled_kernels.backends import Backend, BackendError
from compiled_kernels.operators import Operator, define_operator
from compiled_kernels.paged_attention.inductor import by_spans, decode_attention
from compiled_kernels.paged_attention.reference import KVPages, PagedKV, reference


def define_attention(name: str, kv: type, schema: str) -> Operator:
    """Register an operator of attention over `kv`, whose `flat` tensors and numbers `schema` lists and whose `unflat`
    takes them back."""

    def unpack(q: Tensor, *rest: Any) -> tuple[Tensor, KVPages, Spans, AttentionParameters]:
        count = schema.count(",") + 1
        return q, kv.unflat(*rest[:count]), *unflatten(q.shape[1], *rest[count:])

    return define_operator(
        name,
        f"(Tensor q, {schema}, {SCHEMA}) -> Tensor",
        lambda q, *_: torch.empty_like(q, memory_format=torch.contiguous_format),
        {
            Backend.EAGER: "compiled_kernels.paged_attention.reference:reference",
            Backend.INDUCTOR: "compiled_kernels.paged_attention.inductor:by_spans",
            Backend.TRITON: f"compiled_kernels.{name}.triton:{name}",
            Backend.MLIR: f"compiled_kernels.{name}.mlir:{name}",
        },
        unpack,
    )


def attend_on(
    operator: Operator, backend: Backend, q: Tensor, kv: KVPages, spans: Spans, parameters: AttentionParameters
) -> Tensor:
    """Carry out attention on a backend: as traced or eager code where that can be, else as the opaque operation."""
    if backend is Backend.INDUCTOR and spans.decode_only:
        return decode_attention(q, kv, spans.context_lengths, parameters)
    if backend in (Backend.TRITON, Backend.MLIR):
        parameters.window_and_sinks(operator.name, backend)
    elif not torch.compiler.is_compiling():
        return (by_spans if backend is Backend.INDUCTOR else reference)(q, kv, spans, parameters)
    # Walking spans reads their lengths, which no graph can: inside one, eager and inductor are opaque too.
    return operator.implementation(backend)(q, *kv.flat, *flatten(spans, parameters, backend))


PAGED_ATTENTION = define_attention("paged_attention", PagedKV, "Tensor keys, Tensor values, Tensor page_table")


def paged_attention(
    q: Float[Tensor, "token head dim"],
    kv: PagedKV,
    spans: Spans,
    parameters: AttentionParameters,
    backend: Backend = Backend.EAGER,
) -> Float[Tensor, "token head dim"]:
    """Compute softmax(scale q kᵀ) v for each query head over the context of its key/value head, in float32.

    Memory beyond a sequence's length is never read into a result. A row that sees no key gives zeros, as does one of
    no sequence: spans begin with row 0 and leave none out, so such rows come after the last span.

    Args:
        q: queries of all spans, packed.
        kv: the pools of key and value pages, and the page numbers of each sequence.
        spans: the rows of each sequence, and how many positions it has.
        parameters: scale, mask and what else changes the scores.
        backend: the backend.

    Returns:
        Weighted sums of values in the type of `q`.

    Raises:
        BackendError: for what the backend cannot express: triton and mlir know windows with sinks, no score functions.
    """
    return attend_on(PAGED_ATTENTION, backend, q, kv, spans, parameters)


def unsupported_reason(backend: Backend, mask: Mask, score: Score | None) -> str | None:
    """Return why a backend cannot carry out this mask and score function; None where it can."""
    if backend in (Backend.EAGER, Backend.INDUCTOR):
        return None
    try:
        AttentionParameters(1.0, mask, score=score).window_and_sinks("paged_attention", backend)
    except BackendError as error:
        return str(error)
    return None
