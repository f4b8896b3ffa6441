"""Store one layer's keys and values, most of them quantized. Two verbs: write and attend."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import compiled_kernels
from compiled_kernels import Lane
from compiled_kernels.masks import Mask
from compiled_kernels.quantized_attention import Groups, rotate, settle
from compiled_kernels.scores import Score
from workbench.batch import TokenBatch
from workbench.cache.shapes import CacheShape


class QuantizedLayer:
    """Quantized pages for old groups of tokens, and residual pages of `dtype` for all others and the sinks.

    What a query reads depends on its position alone (see `quantization_rule`).

        write:   tokens -> residual pages;  groups that become old enough -> quantized pages
        attend:  quantized pages for old positions, residual pages for the others, one softmax
    """

    traceable = False  # the groups that a step quantizes are known to Python only: no graph holds the write

    def __init__(self, shape: CacheShape, pages: tuple[int, int], page_size: int, dtype: torch.dtype, device: str):
        """Allocate `pages`: those of the quantized group and of the residual group."""
        self.shape, self.rule, self.page_size = shape, shape.rule, page_size
        self.table, self.recent = shape.table, shape.recent
        self.key_format, self.value_format = shape.page_formats(page_size)
        self.keys = self.key_format.empty(pages[0] + 1, dtype, device)
        self.values = self.value_format.empty(pages[0] + 1, dtype, device)
        size = (pages[1] + 1, shape.groups, page_size, shape.dim)
        self.recent_keys = torch.zeros(size, dtype=dtype, device=device)
        self.recent_values = torch.zeros(size, dtype=dtype, device=device)

    def write(self, k: Tensor, v: Tensor, batch: TokenBatch, lane: Lane = Lane.EAGER) -> None:
        """Store k and v [token, kv_head, head_dim] of the batch's tokens, and quantize groups that become
        old enough."""
        if self.shape.format.rotate:
            k, v = rotate(k), rotate(v)
        slots = batch.slots[self.recent]
        compiled_kernels.kv_write(self.recent_keys, k, slots, lane)
        compiled_kernels.kv_write(self.recent_values, v, slots, lane)
        if batch.settles:
            settle_layers([self], batch)

    def settling(self, batch: TokenBatch) -> list[tuple[int, int, int, int]]:
        """List the groups that this step makes old enough to quantize.

        Returns:
            (sequence, page index in the text, group within the page, tokens always read in full precision) for each.
        """
        rule, size, rows = self.rule, self.page_size, []
        starts, ends = batch.span_starts.tolist(), batch.context_lengths.tolist()
        for seq, end in enumerate(ends):
            settled = rule.settled(end)
            if settled == 0:
                continue
            before = rule.settled(end - (starts[seq + 1] - starts[seq]))
            for at in range(before, settled, rule.group):
                unread = max(0, min(rule.group, rule.first - at))
                rows.append((seq, at // size, at % size // rule.group, unread))
        return rows

    def attend(
        self,
        q: Tensor,
        batch: TokenBatch,
        scale: float,
        mask: Mask,
        lane: Lane,
        softcap: float = 0.0,
        sink_logits: Tensor | None = None,
        score: Score | None = None,
    ) -> Tensor:
        """Return attention of queries [token, head, head_dim] over everything written so far: [token, head,
        head_dim]."""
        turned = self.shape.format.rotate
        mixed = compiled_kernels.quantized_attention(
            rotate(q) if turned else q,
            self.keys,
            self.values,
            self.recent_keys,
            self.recent_values,
            batch.page_tables[self.table],
            batch.page_tables[self.recent],
            batch.span_starts,
            batch.context_lengths,
            scale,
            mask,
            self.rule,
            batch.decode_only and lane is not Lane.INDUCTOR,  # outside a graph that lane compiles decodes itself
            lane,
            softcap,
            sink_logits,
            score,
        )
        return rotate(mixed) if turned else mixed

    def paged(self, table: int) -> tuple[Tensor, ...]:
        """Return every tensor whose first axis is the pages of a cache group: what is copied, swapped or zeroed with a
        page."""
        if table == self.table:
            return *self.keys.tensors, *self.values.tensors
        return (self.recent_keys, self.recent_values) if table == self.recent else ()

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for table in (self.table, self.recent) for tensor in self.paged(table))


def settle_layers(layers: Sequence[QuantizedLayer], batch: TokenBatch) -> None:
    """Quantize the groups that this step makes old enough, in layers of one spec; they lie in residual pages."""
    first = layers[0]
    rows = first.settling(batch)
    if not rows:
        return
    device = first.recent_keys.device
    seqs, places, parts, unread = torch.tensor(rows, device=batch.ids.device).unbind(1)
    from_pages, to_pages = (batch.page_tables[table][seqs, places].long() for table in (first.recent, first.table))
    groups = Groups(first.rule.group, *(each.to(device) for each in (from_pages, to_pages, parts, unread)))
    settle([each.recent_keys for each in layers], [each.keys for each in layers], first.key_format, groups)
    settle([each.recent_values for each in layers], [each.values for each in layers], first.value_format, groups)
