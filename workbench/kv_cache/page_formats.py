"""Store one layer's pages in a format: dense, quantized, or encoded by a user-defined codec (rows or groups of
tokens).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

import torch
from torch import Tensor

import compiled_kernels
from compiled_kernels import Backend
from compiled_kernels.attention import AttentionParameters, Spans, shown_pages
from compiled_kernels.masks import Causal, Mask, SlidingWindow
from compiled_kernels.memory import zero_pages
from compiled_kernels.page_selection.api import select_pages, summarize_pages
from compiled_kernels.paged_attention import PagedKV
from compiled_kernels.quantized_attention import (
    QUANTIZED_NAMES,
    QuantizationRule,
    QuantizedTensor,
    TokenGroups,
    quantize_pages,
)
from workbench.batch import TokenBatch
from workbench.kv_cache.codec import SIDES, LoadedCodec, Side, stored_layout
from workbench.kv_cache.format import KVCacheSpec
from workbench.kv_cache.pages import NULL_PAGE

Put = Callable[[Tensor], Tensor]  # returns a tensor of the same shape and type in other memory


class Pages:
    """One layer's pages in one cache group: tensors whose first axis is the pages; page 0 is the null page."""

    def __init__(self, tensors: tuple[Tensor, ...]):
        self.tensors = tensors

    def move(self, put: Put) -> None:
        """Replace each tensor by what `put` returns for it, for example a copy in other memory."""
        self.tensors = tuple(map(put, self.tensors))

    def kernel_tensors(self) -> dict[str, Tensor]:
        """Return, by name, the tensors that a compiled step reads and writes directly."""
        return {}


class DensePages(Pages):
    """Pages of unquantized keys and values, each [page, kv_head, offset, head_dim]. A layer that selects pages also has
    summaries of each page's keys, each [page, kv_head, head_dim].

    With multi-head latent attention the values are columns of the keys in the same tensor: backends read both at equal
    width, and surplus columns are cut off.
    """

    traceable = True

    def __init__(self, shape: KVCacheSpec, pages: int, page_size: int, dtype: torch.dtype, device: str):
        size = (pages + 1, shape.num_kv_heads, page_size, shape.head_dim)
        one = pages + 1, shape.num_kv_heads, shape.head_dim
        self.num_value_columns = shape.num_value_columns
        self.summary_kinds = () if shape.summaries is None else shape.summaries.kinds
        self.num_sides = 2 if self.num_value_columns is None else 1
        sizes = [size] * self.num_sides + [one] * len(self.summary_kinds)
        super().__init__(tuple(zero_pages(each, dtype, device) for each in sizes))

    @property
    def keys(self) -> Tensor:
        return self.tensors[0]

    @property
    def values(self) -> Tensor:
        return self.tensors[self.num_sides - 1]

    def kernel_tensors(self) -> dict[str, Tensor]:
        summaries = {f"summary{at}": summary for at, summary in enumerate(self.tensors[self.num_sides :])}
        return {"keys": self.keys, "values": self.values, **summaries}

    def write(self, k: Tensor, v: Tensor, slots: Tensor, backend: Backend = Backend.EAGER) -> None:
        """Store k and v [token, kv_head, head_dim] in `slots`, which are counted from the first slot of the null
        page.
        """
        compiled_kernels.kv_write(self.keys, k, slots, backend)
        if self.num_value_columns is None:
            compiled_kernels.kv_write(self.values, v, slots, backend)
        if self.summary_kinds:
            summarize_pages(self.tensors[self.num_sides :], self.keys, slots, self.summary_kinds)

    def read(self, q: Tensor, table: Tensor, batch: TokenBatch, parameters: AttentionParameters) -> PagedKV:
        """Return the pages that `table` [seq, held page] lists; if the layer selects pages, also the pages that the
        queries [token, head, head_dim] select.
        """
        kv, selection = PagedKV(self.keys, self.values, table), parameters.selection
        if selection is None:
            return kv
        chosen = select_pages(q, self.tensors[self.num_sides :], kv.page_table, batch.spans, selection)
        return kv._replace(chosen=chosen)

    def slot_tensors(self) -> tuple[Tensor, ...]:
        """Return views [page, kv_head, offset, ...] of all tensors with an entry for each slot."""
        return self.tensors

    def held(self, pages: list[int], count: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values in these pages, which have `count` tokens: each [page, kv_head, offset, dim]."""
        return self.keys[pages], self.values[pages][..., : self.num_value_columns]

    def encode(self, rows: Tensor, side: Side) -> tuple[Tensor, ...]:
        """Return rows [slot, kv_head, dim] of keys or values in the form in which they are stored."""
        return (rows,)


class GroupPages(Pages):
    """Pages that store whole groups of tokens, encoded from residual pages."""

    @classmethod
    def encode_groups(cls, pages: Sequence[Self], residual: Sequence[DensePages], groups: TokenGroups) -> None:
        """Encode the same groups of tokens in several layers with one spec, from their residual pages."""
        raise NotImplementedError

    def read_groups(
        self, table: Tensor, batch: TokenBatch, mask: Mask, rule: QuantizationRule
    ) -> tuple[QuantizedTensor, QuantizedTensor, Tensor]:
        """Return the keys and the values of the groups that a batch reads under a mask, and a page table for them."""
        raise NotImplementedError


class QuantizedPages(GroupPages):
    """Pages of quantized keys and values, in whole groups of tokens (see `PageFormat`)."""

    def __init__(self, shape: KVCacheSpec, pages: int, page_size: int, dtype: torch.dtype, device: str):
        self.formats = shape.page_formats(page_size)
        keys, values = (each.empty(pages + 1, dtype, device).tensors for each in self.formats)
        self.num_key_tensors = len(keys)
        super().__init__(keys + values)

    @property
    def sides(self) -> tuple[QuantizedTensor, QuantizedTensor]:
        """Return the quantized tensor of keys, and that of values."""
        count = self.num_key_tensors
        return QuantizedTensor(*self.tensors[:count]), QuantizedTensor(*self.tensors[count:])

    def kernel_tensors(self) -> dict[str, Tensor]:
        keys, values = self.sides
        return dict(zip(QUANTIZED_NAMES, (*keys.kernel_tensors, *values.kernel_tensors), strict=True))

    @classmethod
    def encode_groups(cls, pages: Sequence[Self], residual: Sequence[DensePages], groups: TokenGroups) -> None:
        recent = [each.keys for each in residual], [each.values for each in residual]
        quantized = zip(*(each.sides for each in pages), strict=True)
        for tokens, side, format in zip(recent, quantized, pages[0].formats, strict=True):
            quantize_pages(tokens, side, format, groups)

    def read_groups(
        self, table: Tensor, batch: TokenBatch, mask: Mask, rule: QuantizationRule
    ) -> tuple[QuantizedTensor, QuantizedTensor, Tensor]:
        return *self.sides, table


class CodecPages(GroupPages):
    """Pages encoded by a codec: tensors [page, offset, ...] of rows, or [page, block, ...] of groups.

    For attention, the pages of a batch are decoded into dense, renumbered pages, which every backend can read.
    """

    traceable = False

    def __init__(
        self, shape: KVCacheSpec, codec: LoadedCodec, pages: int, page_size: int, dtype: torch.dtype, device: str
    ):
        self.codec, self.dtype = codec.ready(shape.num_kv_heads, shape.head_dim, device), dtype
        self.num_kv_heads, self.head_dim, self.page_size = shape.num_kv_heads, shape.head_dim, page_size
        layout = stored_layout(self.codec, shape.num_kv_heads, shape.head_dim, dtype)
        each = page_size // (codec.group or 1)
        self.num_key_tensors = len(layout.keys)
        sizes = [((pages + 1, each, *size), kind) for side in layout for size, kind in side]
        super().__init__(tuple(zero_pages(size, kind, device) for size, kind in sizes))

    def side_tensors(self, side: Side) -> tuple[Tensor, ...]:
        """Return the stored tensors of keys, or of values."""
        return self.tensors[: self.num_key_tensors] if side == "keys" else self.tensors[self.num_key_tensors :]

    def write(self, keys: Tensor, values: Tensor, slots: Tensor, backend: Backend = Backend.EAGER) -> None:
        """Encode rows (or blocks) of keys and of values, and store them in `slots`, which are counted from the first
        slot of the null page."""
        slots = slots.long()
        for rows, side in zip((keys, values), SIDES, strict=True):
            for stored, encoded in zip(self.side_tensors(side), self.encode(rows, side), strict=True):
                stored.flatten(0, 1)[slots] = encoded

    def read(self, q: Tensor, table: Tensor, batch: TokenBatch, parameters: AttentionParameters) -> PagedKV:
        """Return the pages of a table [seq, held page] that a batch reads under a mask, decoded, with the null page
        first."""
        table = shown_table(table, batch.spans, parameters.mask, self.page_size)
        return PagedKV(*self.decode(table, batch.context_lengths))

    @classmethod
    def encode_groups(cls, pages: Sequence[Self], residual: Sequence[DensePages], groups: TokenGroups) -> None:
        for mine, recent in zip(pages, residual, strict=True):
            keys, values = (groups.gather(each).transpose(1, 2) for each in (recent.keys, recent.values))
            mine.write(keys, values, groups.to_pages * (mine.page_size // groups.group_size) + groups.parts)

    def read_groups(
        self, table: Tensor, batch: TokenBatch, mask: Mask, rule: QuantizationRule
    ) -> tuple[QuantizedTensor, QuantizedTensor, Tensor]:
        ends = rule.quantized_until_each(batch.context_lengths)
        keys, values, renumbered = self.decode(shown_table(table, batch.spans, mask, self.page_size), ends)
        return QuantizedTensor(keys), QuantizedTensor(values), renumbered

    def decode(self, table: Tensor, ends: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Decode each page of `table` [seq, held page] once. Return keys and values [page, kv_head, offset, head_dim],
        with the null page first, and the table with the new page numbers.

        Sequences are encoded up to the positions `ends` [seq]. Later positions and the null page are zero: a codec
        never decodes data that it has not encoded.
        """
        null = torch.full((1,), NULL_PAGE, dtype=table.dtype, device=table.device)
        used, renumbered = torch.cat([null, table.flatten()]).unique(return_inverse=True)
        first = self.page_size * torch.arange(table.shape[1], device=table.device)
        held = (ends.to(table.device)[:, None] - first).clamp(0, self.page_size).flatten()
        known = held.new_zeros(len(used)).scatter_reduce(0, renumbered[1:], held, "amax")
        known[0] = 0
        each = self.codec.group or 1
        written = each * torch.arange(self.page_size // each, device=table.device) < known[:, None]  # [page, row]
        keys, values = (self._decode(side, used.long(), written) for side in SIDES)
        return keys, values, renumbered[1:].view_as(table).to(table.dtype)

    def _decode(self, side: Side, used: Tensor, written: Tensor) -> Tensor:
        pages, offsets = written.nonzero(as_tuple=True)
        found = torch.zeros(len(used), self.page_size, self.num_kv_heads, self.head_dim, dtype=self.dtype,
                            device=used.device)  # fmt: skip
        if len(pages):
            stored = tuple(tensor[used[pages], offsets] for tensor in self.side_tensors(side))
            rows = self.codec.decode(stored, self.num_kv_heads, self.head_dim, side).to(self.dtype)
            split = found if self.codec.group is None else found.unflatten(1, (-1, self.codec.group))
            split[pages, offsets] = rows
        return found.transpose(1, 2).contiguous()

    def slot_tensors(self) -> tuple[Tensor, ...]:
        """Return views [page, kv_head, offset, ...] of all tensors with an entry for each slot."""
        return tuple(each.transpose(1, 2) for each in self.tensors)

    def held(self, pages: list[int], count: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values in these pages, which have `count` tokens: each [page, kv_head, offset, dim]."""
        device = self.tensors[0].device
        table = torch.tensor([pages], dtype=torch.int32, device=device)
        keys, values, (used,) = self.decode(table, torch.tensor([count], device=device))
        return keys[used.long()], values[used.long()]

    def encode(self, rows: Tensor, side: Side) -> tuple[Tensor, ...]:
        """Return rows [slot, kv_head, dim] (or blocks) of keys or values in the form in which they are stored."""
        return self.codec.encode(rows.to(self.dtype), side)


def shown_table(table: Tensor, spans: Spans, mask: Mask, page_size: int) -> Tensor:
    """Return `table` [seq, held page] with the null page in place of pages that no query of the spans sees. (Pages that
    have left a window are freed, and are the null page already.)
    """
    if isinstance(mask, Causal | SlidingWindow):
        return table
    found = torch.full_like(table, NULL_PAGE)
    for seq, rows, context in spans.listed():
        shown = shown_pages(mask, context, rows.stop - rows.start, page_size, table.device)
        read = slice(None) if shown is None else shown[shown < table.shape[1]]
        found[seq, read] = table[seq, read]
    return found
