"""Attention of packed spans over keys and values that lie in pages."""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Float, Int
from torch import Tensor

from compiled_kernels.lanes import Lane
from compiled_kernels.paged_attention.page_blocked import decode
from compiled_kernels.paged_attention.reference import reference

# Given query and key positions that broadcast: True where the query may look.
Mask = Callable[[Tensor, Tensor], Tensor]


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
    lane: Lane,
) -> Float[Tensor, "token head dim"]:
    """softmax(scale q kᵀ) v for each query head over its group's context, in float32.

    Sequence s owns the tokens [span_starts[s], span_starts[s + 1]), the last of its `context_lengths[s]`
    positions; position p lies in page `page_table[s, p // offset]`. What no sequence's length covers is never
    read into a result, whatever stands there. A row that may look nowhere gives zeros.
    """
    if lane is Lane.INDUCTOR and decode_only:
        return decode(q, keys, values, page_table, context_lengths, scale, mask)
    return reference(q, keys, values, page_table, span_starts, context_lengths, scale, mask)
