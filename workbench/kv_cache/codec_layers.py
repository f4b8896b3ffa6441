"""Store one layer's keys and values as a user-defined codec encodes them: token by token, or in whole groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from compiled_kernels import Backend
from compiled_kernels.attention import AttentionParameters, Spans, shown_pages
from compiled_kernels.masks import Causal, Mask, SlidingWindow
from compiled_kernels.paged_attention import PagedKV
from compiled_kernels.quantized_attention import QuantizedKV, QuantizedTensor, TokenGroups
from workbench.batch import TokenBatch
from workbench.kv_cache.codec import SIDES, LoadedCodec, Side, stored_layout
from workbench.kv_cache.format import KVCacheSpec
from workbench.kv_cache.layer import CacheLayer, Put
from workbench.kv_cache.pages import NULL_PAGE
from workbench.kv_cache.quantized import QuantizedLayer


class CodecPages:
    """Pages of one layer as a codec encodes them: tensors [page, offset, ...] of rows, [page, block, ...] of groups;
    page 0 is the null page."""

    def __init__(
        self, shape: KVCacheSpec, codec: LoadedCodec, pages: int, page_size: int, dtype: torch.dtype, device: str
    ):
        self.codec, self.dtype = codec.ready(shape.num_kv_heads, shape.head_dim, device), dtype
        self.num_kv_heads, self.head_dim, self.page_size = shape.num_kv_heads, shape.head_dim, page_size
        layout = stored_layout(self.codec, shape.num_kv_heads, shape.head_dim, dtype)
        each = page_size // (codec.group or 1)
        self.keys, self.values = (
            tuple(torch.zeros(pages + 1, each, *size, dtype=kind, device=device) for size, kind in side)
            for side in layout
        )

    def write(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Encode rows (or blocks) of keys and of values, and store them in `slots`, counted from the null page's
        first."""
        for rows, side, pages in zip((keys, values), SIDES, (self.keys, self.values), strict=True):
            for stored, encoded in zip(pages, self.codec.encode(rows.to(self.dtype), side), strict=True):
                stored.flatten(0, 1)[slots] = encoded

    def decode(self, table: Tensor, ends: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the pages of a table [seq, held], each decoded once: keys and values [page, kv_head, offset,
        head_dim], the null page first, and the table of their new numbers.

        Sequences have been encoded up to the positions `ends` [seq]. What lies behind, and the null page, is zero: a
        codec decodes nothing but what it has encoded.
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
        tensors = self.keys if side == "keys" else self.values
        found = torch.zeros(len(used), self.page_size, self.num_kv_heads, self.head_dim, dtype=self.dtype,
                            device=used.device)  # fmt: skip
        if len(pages):
            stored = tuple(tensor[used[pages], offsets] for tensor in tensors)
            rows = self.codec.decode(stored, self.num_kv_heads, self.head_dim, side).to(self.dtype)
            split = found if self.codec.group is None else found.unflatten(1, (-1, self.codec.group))
            split[pages, offsets] = rows
        return found.transpose(1, 2).contiguous()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return *self.keys, *self.values

    def move(self, put: Put) -> None:
        """Replace each tensor by what `put` returns for it."""
        self.keys, self.values = tuple(map(put, self.keys)), tuple(map(put, self.values))


def shown_table(table: Tensor, spans: Spans, mask: Mask, page_size: int) -> Tensor:
    """Return a page table [seq, held] whose pages that no query of the spans sees are the null page. Those behind a
    window have been freed, and are so already."""
    if isinstance(mask, Causal | SlidingWindow):
        return table
    found = torch.full_like(table, NULL_PAGE)
    for seq, rows, context in spans.listed():
        shown = shown_pages(mask, context, rows.stop - rows.start, page_size, table.device)
        read = slice(None) if shown is None else shown[shown < table.shape[1]]
        found[seq, read] = table[seq, read]
    return found


class CodecLayer(CacheLayer):
    """One layer's keys and values as a codec encodes each token.

    Attention decodes the pages that a batch reads into dense ones, renumbered, so that every backend reads them.
    """

    def __init__(
        self, shape: KVCacheSpec, codec: LoadedCodec, pages: int, page_size: int, dtype: torch.dtype, device: str
    ):
        self.group, self.page_size = shape.group, page_size
        self.pages = CodecPages(shape, codec, pages, page_size, dtype, device)

    def write(self, k: Tensor, v: Tensor, batch: TokenBatch, backend: Backend = Backend.EAGER) -> None:
        self.pages.write(k, v, batch.slot_mapping[self.group].long())

    def read(self, q: Tensor, batch: TokenBatch, parameters: AttentionParameters) -> PagedKV:
        """Return the pages that a batch reads under a mask, decoded; the null page comes first."""
        table = shown_table(batch.page_tables[self.group], batch.spans, parameters.mask, self.page_size)
        return PagedKV(*self.pages.decode(table, batch.context_lengths))

    def page_tensors(self, group: int) -> tuple[Tensor, ...]:
        return self.pages.tensors if group == self.group else ()

    def move(self, put: Put) -> None:
        self.pages.move(put)

    def slot_tensors(self) -> tuple[Tensor, ...]:
        """Return views [page, kv_head, offset, ...] of all that a slot holds of its token."""
        return tuple(each.transpose(1, 2) for each in self.pages.tensors)

    def held(self, pages: list[int], count: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of these pages, which hold `count` tokens: each [page, kv_head, offset, dim]."""
        device = self.pages.tensors[0].device
        table = torch.tensor([pages], dtype=torch.int32, device=device)
        keys, values, (used,) = self.pages.decode(table, torch.tensor([count], device=device))
        return keys[used.long()], values[used.long()]

    def encode(self, rows: Tensor, side: Side) -> tuple[Tensor, ...]:
        """Return rows [slot, kv_head, dim] of keys or values as they are stored."""
        return self.pages.codec.encode(rows.to(self.pages.dtype), side)


class GroupedCodecLayer(QuantizedLayer):
    """One layer's keys and values as a codec encodes whole groups of old tokens, and residual pages for all others.

    It keeps everything that a quantized layer promises, since it is one but for the codes: a group is encoded when its
    last token is `residual_length` old, from the residual pages, whatever step it is. A query reads it so from the
    position on at which that is so, alone or in a chunk. Drafts that are rejected leave a group at most encoded too
    early: no accepted query reads it before its last token is known, and by then it is encoded again.
    """

    def __init__(
        self,
        shape: KVCacheSpec,
        codec: LoadedCodec,
        pages: tuple[int, int],
        page_size: int,
        dtype: torch.dtype,
        device: str,
    ):
        """Allocate `pages`: those of the encoded group and of the residual group."""
        self._allocate_residual(shape, pages[1], page_size, dtype, device)
        self.pages = CodecPages(shape, codec, pages[0], page_size, dtype, device)

    @classmethod
    def quantize(cls, layers: Sequence[Self], groups: TokenGroups) -> None:
        """Encode the same groups of several layers, each by its own codec."""
        for layer in layers:
            keys, values = (
                groups.gather(each).transpose(1, 2) for each in (layer.residual_keys, layer.residual_values)
            )
            per_page = layer.page_size // groups.group_size
            layer.pages.write(keys, values, groups.to_pages * per_page + groups.parts)

    def read(self, q: Tensor, batch: TokenBatch, parameters: AttentionParameters) -> QuantizedKV:
        """Return the pages that a batch reads under a mask, the encoded ones decoded."""
        table = shown_table(batch.page_tables[self.group], batch.spans, parameters.mask, self.page_size)
        ends = self.quantization_rule.quantized_until_each(batch.context_lengths)
        keys, values, renumbered = self.pages.decode(table, ends)
        recent = self.residual_keys, self.residual_values
        tables = renumbered, batch.page_tables[self.residual_group]
        return QuantizedKV(QuantizedTensor(keys), QuantizedTensor(values), *recent, *tables, self.quantization_rule)

    @property
    def quantized_tensors(self) -> tuple[Tensor, ...]:
        return self.pages.tensors

    def move_quantized(self, put: Put) -> None:
        self.pages.move(put)
