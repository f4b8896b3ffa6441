"""One step's work as tensors."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor


@dataclass(frozen=True)
class TokenBatch:
    """Packed spans, the decodes (spans of one token) first.

    token:  | seq 0 | seq 1 | seq 2 ........ | seq 3 ...... |     span_starts = [0, 1, 2, 10, 16]
              decode  decode  prefill chunk    prefill chunk

    `page_tables`, `slots` have one entry a layer group: the pages of each sequence in the order of its
    positions, and where each token's keys and values are written (page * tokens a page + offset).
    Padding rows write to the null page and are never sampled.
    """

    ids: Int[Tensor, " token"]
    positions: Int[Tensor, " token"]
    span_starts: Int[Tensor, " seq_plus_one"]
    context_lengths: Int[Tensor, " seq"]  # tokens held after this step, the span's own included
    page_tables: tuple[Int[Tensor, "seq held"], ...]
    slots: tuple[Int[Tensor, " token"], ...]
    sample_rows: Int[Tensor, " sample"]
    decode_only: bool
    settles: bool = True  # whether writing packs what becomes old enough; not where `KVStore.settle` did before

    @property
    def rows(self) -> int:
        return self.ids.shape[0]
