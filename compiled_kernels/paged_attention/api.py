"""Attention of packed spans over keys and values that lie in pages."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from compiled_kernels.lanes import Lane, LaneError, spoken
from compiled_kernels.masks import Mask, band
from compiled_kernels.operators import define
from compiled_kernels.paged_attention.page_blocked import decode
from compiled_kernels.paged_attention.reference import reference
from compiled_kernels.paged_attention.spans import by_spans
from compiled_kernels.scores import Score, biased

PAGED_ATTENTION = define(
    "paged_attention",
    "(Tensor q, Tensor keys, Tensor values, Tensor page_table, Tensor span_starts, Tensor context_lengths, float scale,"
    " int window, int sinks, bool decode_only, float softcap, Tensor? sink_logits, bool alibi) -> Tensor",
    lambda q, *_: torch.empty_like(q, memory_format=torch.contiguous_format),
    {
        Lane.EAGER: "compiled_kernels.paged_attention.spans:eager_form",
        Lane.INDUCTOR: "compiled_kernels.paged_attention.spans:inductor_form",
        Lane.TRITON: "compiled_kernels.paged_attention.triton:paged_attention",
        Lane.MLIR: "compiled_kernels.paged_attention.mlir:paged_attention",
    },
)


def paged_attention(
    q: Float[Tensor, "token head dim"],
    keys: Float[Tensor, "page group offset dim"],
    values: Float[Tensor, "page group offset dim"],
    page_table: Int[Tensor, "seq held"],
    span_starts: Int[Tensor, " seq_plus_one"],
    context_lengths: Int[Tensor, " seq"],
    scale: float,
    mask: Mask,
    decode_only: bool,
    lane: Lane = Lane.EAGER,
    softcap: float = 0.0,
    sink_logits: Float[Tensor, " head"] | None = None,
    score: Score | None = None,
) -> Float[Tensor, "token head dim"]:
    """softmax(scale q kᵀ) v for each query head over its group's context, in float32.

    Sequence s owns the tokens [span_starts[s], span_starts[s + 1]), the last of its `context_lengths[s]`
    positions; position p lies in page `page_table[s, p // offset]`. What no sequence's length covers is never
    read into a result, whatever stands there. A row that may look nowhere gives zeros, as does one of no sequence:
    spans begin with row 0 and leave none out, so such rows come after the last span.

    `softcap` c > 0 makes every score c tanh(score / c) (Gemma 2, 2024), `score` then puts another in its place (see
    scores.py); `sink_logits` adds one logit a head to the softmax's sum that attends to nothing (gpt-oss, 2025).
    `decode_only` promises that every span has one token. Raises LaneError for what `lane` cannot say: triton and mlir
    know windows with sinks and no score functions.
    """
    rule = scale, mask, softcap, sink_logits, score
    if lane is Lane.INDUCTOR and decode_only:
        return decode(q, keys, values, page_table, context_lengths, *rule)
    if lane is Lane.INDUCTOR and not torch.compiler.is_compiling():
        return by_spans(q, keys, values, page_table, span_starts, context_lengths, *rule)
    if lane is Lane.EAGER and not torch.compiler.is_compiling():
        return reference(q, keys, values, page_table, span_starts, context_lengths, *rule)
    # Walking spans reads their lengths, which no graph can: inside one, these lanes are opaque too.
    (window, sinks), alibi = _sayable(lane, mask, score)
    cache = keys, values, page_table, span_starts, context_lengths
    return PAGED_ATTENTION.form(lane)(q, *cache, scale, window, sinks, decode_only, softcap, sink_logits, alibi)


def refusal(lane: Lane, mask: Mask, score: Score | None) -> str | None:
    """Why `lane` cannot carry out this mask and score function; None where it can."""
    if lane in (Lane.EAGER, Lane.INDUCTOR):
        return None
    try:
        _sayable(lane, mask, score)
    except LaneError as error:
        return str(error)
    return None


def _sayable(lane: Lane, mask: Mask, score: Score | None) -> tuple[tuple[int, int], bool]:
    if lane in (Lane.TRITON, Lane.MLIR) and score is not None:
        raise LaneError(f"paged_attention: lane {lane} knows no score functions, not {spoken(score)}")
    return band(mask, lane), biased(score, lane)
