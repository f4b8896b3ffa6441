"""Attention of packed spans over keys and values most of which lie quantized in pages (KIVI, Liu et al. 2024)."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from compiled_kernels.backends import Backend, BackendError, describe_callable
from compiled_kernels.masks import Mask, window_and_sinks
from compiled_kernels.operators import define_operator
from compiled_kernels.quantized_attention.inductor import by_spans, decode_attention
from compiled_kernels.quantized_attention.pages import QuantizationRule
from compiled_kernels.quantized_attention.quantize import QuantizedTensor
from compiled_kernels.quantized_attention.reference import reference
from compiled_kernels.scores import Score, uses_alibi

QUANTIZED_ATTENTION = define_operator(
    "quantized_attention",
    "(Tensor q, Tensor key_codes, Tensor? key_scales, Tensor? key_minima, Tensor value_codes, Tensor? value_scales,"
    " Tensor? value_minima, Tensor residual_keys, Tensor residual_values, Tensor quantized_table,"
    " Tensor residual_table, Tensor span_starts, Tensor context_lengths,"
    " int group, int lag, int first, float scale, int window, int sinks,"
    " bool decode_only, float softcap, Tensor? sink_logits, bool alibi) -> Tensor",
    lambda q, *_: torch.empty_like(q, memory_format=torch.contiguous_format),
    {
        Backend.EAGER: "compiled_kernels.quantized_attention.inductor:eager_form",
        Backend.INDUCTOR: "compiled_kernels.quantized_attention.inductor:inductor_form",
        Backend.TRITON: "compiled_kernels.quantized_attention.triton:quantized_attention",
        Backend.MLIR: "compiled_kernels.quantized_attention.mlir:quantized_attention",
    },
)


def quantized_attention(
    q: Float[Tensor, "token head dim"],
    keys: QuantizedTensor,
    values: QuantizedTensor,
    residual_keys: Float[Tensor, "recent_page group offset dim"],
    residual_values: Float[Tensor, "recent_page group offset dim"],
    quantized_table: Int[Tensor, "seq packed_held"],
    residual_table: Int[Tensor, "seq recent_held"],
    span_starts: Int[Tensor, " seq_plus_one"],
    context_lengths: Int[Tensor, " seq"],
    scale: float,
    mask: Mask,
    rule: QuantizationRule,
    decode_only: bool,
    backend: Backend = Backend.EAGER,
    softcap: float = 0.0,
    sink_logits: Float[Tensor, " head"] | None = None,
    score: Score | None = None,
) -> Float[Tensor, "token head dim"]:
    """Compute softmax(scale q kᵀ) v over quantized keys and values as their codes say, and over the residual ones in
    full precision.

    `keys` are quantized [page, kv_head, dim, offset], `values` [page, kv_head, offset, dim], dense ones both the
    latter. A query at position t reads position p quantized where `rule` says so, from page `quantized_table[s, p //
    offset]`, else from the residual page in that place. All else is as in `paged_attention`.

    Args:
        rule: which positions a query reads quantized.

    Raises:
        BackendError: for what the backend cannot express: triton and mlir know windows whose sinks are not quantized,
            and no score functions; mlir reads no dense keys beside quantized values.
    """
    cache = keys, values, residual_keys, residual_values, quantized_table, residual_table
    rest = scale, mask, rule, softcap, sink_logits, score
    if backend is Backend.INDUCTOR and decode_only:
        return decode_attention(q, *cache, context_lengths, *rest)
    if backend in (Backend.INDUCTOR, Backend.EAGER) and not torch.compiler.is_compiling():
        return (by_spans if backend is Backend.INDUCTOR else reference)(q, *cache, span_starts, context_lengths, *rest)
    if score is not None and backend in (Backend.TRITON, Backend.MLIR):
        raise BackendError(
            f"quantized_attention: backend {backend} knows no score functions, not {describe_callable(score)}"
        )
    window, sinks = window_and_sinks(mask, backend)
    tensors = *keys, *values, *cache[2:], span_starts, context_lengths
    numbers = rule.quant_group, rule.residual_length, rule.num_sink_tokens, scale, window, sinks, decode_only, softcap
    return QUANTIZED_ATTENTION.implementation(backend)(q, *tensors, *numbers, sink_logits, uses_alibi(score, backend))
