"""Store one layer's keys and values, most of them quantized. Two verbs: write and attend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

import compiled_kernels
from compiled_kernels import Backend
from compiled_kernels.attention import AttentionParameters
from compiled_kernels.quantized_attention import QuantizedKV, TokenGroups, hadamard_rotate, quantize_pages
from workbench.batch import TokenBatch
from workbench.kv_cache.format import KVCacheSpec
from workbench.kv_cache.layer import CacheLayer, Put


class QuantizedLayer(CacheLayer):
    """Quantized pages for old groups of tokens, and residual pages of `dtype` for all others and the sinks.

    What a query reads depends on its position alone (see `quantization_rule`).

        write:   tokens -> residual pages;  groups that become old enough -> quantized pages
        attend:  quantized pages for old positions, residual pages for the others, one softmax
    """

    def __init__(self, shape: KVCacheSpec, pages: tuple[int, int], page_size: int, dtype: torch.dtype, device: str):
        """Allocate `pages`: those of the quantized group and of the residual group."""
        self._allocate_residual(shape, pages[1], page_size, dtype, device)
        self.key_format, self.value_format = shape.page_formats(page_size)
        self.keys = self.key_format.empty(pages[0] + 1, dtype, device)
        self.values = self.value_format.empty(pages[0] + 1, dtype, device)

    def _allocate_residual(
        self, shape: KVCacheSpec, pages: int, page_size: int, dtype: torch.dtype, device: str
    ) -> None:
        self.shape, self.quantization_rule, self.page_size = shape, shape.quantization_rule, page_size
        self.group, self.residual_group, self.rotates = shape.group, shape.residual_group, shape.format.rotate
        size = (pages + 1, shape.num_kv_heads, page_size, shape.head_dim)
        self.residual_keys = torch.zeros(size, dtype=dtype, device=device)
        self.residual_values = torch.zeros(size, dtype=dtype, device=device)

    def write(self, k: Tensor, v: Tensor, batch: TokenBatch, backend: Backend = Backend.EAGER) -> None:
        """Store k and v [token, kv_head, head_dim] of the batch's tokens, and quantize groups that become
        old enough."""
        if self.rotates:
            k, v = hadamard_rotate(k), hadamard_rotate(v)
        slots = batch.slot_mapping[self.residual_group]
        compiled_kernels.kv_write(self.residual_keys, k, slots, backend)
        compiled_kernels.kv_write(self.residual_values, v, slots, backend)
        if batch.quantize_on_write:
            quantize_layers([self], batch)

    def groups_to_quantize(self, batch: TokenBatch) -> list[tuple[int, int, int, int]]:
        """List the groups that this step makes old enough to quantize.

        Returns:
            (sequence, page index in the text, group within the page, tokens always read in full precision) for each.
        """
        rule, size, rows = self.quantization_rule, self.page_size, []
        starts, ends = batch.span_starts.tolist(), batch.context_lengths.tolist()
        for seq, end in enumerate(ends):
            before = rule.quantized_until(end - (starts[seq + 1] - starts[seq]))
            for at in range(before, rule.quantized_until(end), rule.quant_group):
                unread = max(0, min(rule.quant_group, rule.num_sink_tokens - at))
                rows.append((seq, at // size, at % size // rule.quant_group, unread))
        return rows

    @classmethod
    def quantize(cls, layers: Sequence[Self], groups: TokenGroups) -> None:
        """Quantize the same groups of several layers of one spec, from residual pages."""
        for residual, quantized, format in (
            ([each.residual_keys for each in layers], [each.keys for each in layers], layers[0].key_format),
            ([each.residual_values for each in layers], [each.values for each in layers], layers[0].value_format),
        ):
            quantize_pages(residual, quantized, format, groups)

    def read(self, q: Tensor, batch: TokenBatch, parameters: AttentionParameters) -> QuantizedKV:
        pages = self.keys, self.values, self.residual_keys, self.residual_values
        tables = batch.page_tables[self.group], batch.page_tables[self.residual_group]
        return QuantizedKV(*pages, *tables, self.quantization_rule)

    def attend(self, q: Tensor, batch: TokenBatch, parameters: AttentionParameters, backend: Backend) -> Tensor:
        q = hadamard_rotate(q) if self.rotates else q
        # Outside a graph inductor compiles decodes itself.
        spans = batch.spans._replace(decode_only=batch.decode_only and backend is not Backend.INDUCTOR)
        kv = self.read(q, batch, parameters)
        mixed = compiled_kernels.quantized_attention(q, kv, spans, parameters, backend)
        return hadamard_rotate(mixed) if self.rotates else mixed

    def page_tensors(self, group: int) -> tuple[Tensor, ...]:
        if group == self.group:
            return self.quantized_tensors
        return (self.residual_keys, self.residual_values) if group == self.residual_group else ()

    @property
    def quantized_tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors of the quantized pages, each [page, ...]."""
        return *self.keys.tensors, *self.values.tensors

    def move(self, put: Put) -> None:
        self.move_quantized(put)
        self.residual_keys, self.residual_values = put(self.residual_keys), put(self.residual_values)

    def move_quantized(self, put: Put) -> None:
        """Replace each of `quantized_tensors` by what `put` returns for it."""
        self.keys, self.values = self.keys.map(put), self.values.map(put)


def quantize_layers(layers: Sequence[QuantizedLayer], batch: TokenBatch) -> None:
    """Quantize the groups that this step makes old enough, in layers of one spec; they lie in residual pages."""
    first = layers[0]
    rows = first.groups_to_quantize(batch)
    if not rows:
        return
    device = first.residual_keys.device
    seqs, places, parts, unread = torch.tensor(rows, device=batch.token_ids.device).unbind(1)
    from_pages, to_pages = (
        batch.page_tables[table][seqs, places].long() for table in (first.residual_group, first.group)
    )
    groups = TokenGroups(
        first.quantization_rule.quant_group, *(each.to(device) for each in (from_pages, to_pages, parts, unread))
    )
    first.quantize(layers, groups)
