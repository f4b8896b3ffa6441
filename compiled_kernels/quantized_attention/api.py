"""Attention of packed spans over keys and values most of which lie quantized in pages (KIVI, Liu et al. 2024)."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from compiled_kernels.lanes import Lane, LaneError, spoken
from compiled_kernels.masks import Mask, band
from compiled_kernels.operators import define
from compiled_kernels.quantized_attention.packed import Packed
from compiled_kernels.quantized_attention.page_blocked import decode
from compiled_kernels.quantized_attention.reference import reference
from compiled_kernels.quantized_attention.rule import Settling
from compiled_kernels.quantized_attention.spans import by_spans
from compiled_kernels.scores import Score, biased

QUANTIZED_ATTENTION = define(
    "quantized_attention",
    "(Tensor q, Tensor key_codes, Tensor? key_scales, Tensor? key_minima, Tensor value_codes, Tensor? value_scales,"
    " Tensor? value_minima, Tensor recent_keys, Tensor recent_values, Tensor packed_table, Tensor recent_table,"
    " Tensor span_starts, Tensor context_lengths, int group, int lag, int first, float scale, int window, int sinks,"
    " bool decode_only, float softcap, Tensor? sink_logits, bool alibi) -> Tensor",
    lambda q, *_: torch.empty_like(q, memory_format=torch.contiguous_format),
    {
        Lane.EAGER: "compiled_kernels.quantized_attention.spans:eager_form",
        Lane.INDUCTOR: "compiled_kernels.quantized_attention.spans:inductor_form",
        Lane.TRITON: "compiled_kernels.quantized_attention.triton:quantized_attention",
        Lane.MLIR: "compiled_kernels.quantized_attention.mlir:quantized_attention",
    },
)


def quantized_attention(
    q: Float[Tensor, "token head dim"],
    keys: Packed,
    values: Packed,
    recent_keys: Float[Tensor, "recent_page group offset dim"],
    recent_values: Float[Tensor, "recent_page group offset dim"],
    packed_table: Int[Tensor, "seq packed_held"],
    recent_table: Int[Tensor, "seq recent_held"],
    span_starts: Int[Tensor, " seq_plus_one"],
    context_lengths: Int[Tensor, " seq"],
    scale: float,
    mask: Mask,
    rule: Settling,
    decode_only: bool,
    lane: Lane = Lane.EAGER,
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
        LaneError: for what the backend cannot express: triton and mlir know windows whose sinks are not quantized, and
            no score functions; mlir reads no dense keys beside quantized values.
    """
    cache = keys, values, recent_keys, recent_values, packed_table, recent_table
    rest = scale, mask, rule, softcap, sink_logits, score
    if lane is Lane.INDUCTOR and decode_only:
        return decode(q, *cache, context_lengths, *rest)
    if lane in (Lane.INDUCTOR, Lane.EAGER) and not torch.compiler.is_compiling():
        return (by_spans if lane is Lane.INDUCTOR else reference)(q, *cache, span_starts, context_lengths, *rest)
    if score is not None and lane in (Lane.TRITON, Lane.MLIR):
        raise LaneError(f"quantized_attention: lane {lane} knows no score functions, not {spoken(score)}")
    window, sinks = band(mask, lane)
    tensors = *keys, *values, *cache[2:], span_starts, context_lengths
    numbers = rule.group, rule.lag, rule.first, scale, window, sinks, decode_only, softcap
    return QUANTIZED_ATTENTION.form(lane)(q, *tensors, *numbers, sink_logits, biased(score, lane))
