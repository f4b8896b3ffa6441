"""Define the tensors of one step's batch."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from compiled_kernels.attention import Spans


@dataclass(frozen=True)
class TokenBatch:
    """The tensors of one step: the tokens of each sequence (its span), packed one sequence after another. Decodes, the
    spans of one token, come first.

    token:  | seq 0 | seq 1 | seq 2 ........ | seq 3 ...... |     span_starts = [0, 1, 2, 10, 16]
              decode  decode  prefill chunk    prefill chunk

    `page_tables` and `slot_mapping` have one entry per cache group. A page table lists each sequence's pages in order
    of positions. A slot is the position of a token's keys and values in the cache: page * page_size + offset. Padding
    rows write to the null page and are never sampled. In a group of recurrent layers the table has the page of the
    state before each span, and a token's slot is the page for the state after it, or the null page if that is not
    stored.
    """

    token_ids: Int[Tensor, " token"]
    positions: Int[Tensor, " token"]
    span_starts: Int[Tensor, " seq_plus_one"]
    context_lengths: Int[Tensor, " seq"]  # number of stored tokens after this step, the span's own included
    page_tables: tuple[Int[Tensor, "seq held"], ...]
    slot_mapping: tuple[Int[Tensor, " token"], ...]
    logits_indices: Int[Tensor, " sample"]
    decode_only: bool
    length_limits: Int[Tensor, " token"] | None = None  # maximum tokens of each token's sequence
    quantize_on_write: bool = (
        True  # whether `write` quantizes tokens that become old enough; False if `KVStore.quantize_pending` did
    )

    parents: Int[Tensor, " token"] | None = None  # for drafts that are trees: see `Spans`

    @property
    def spans(self) -> Spans:
        return Spans(self.span_starts, self.context_lengths, self.decode_only, self.parents)

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]
