"""Attention's layers of the cache: pages of one format, or pages of old groups of tokens and of all other tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import compiled_kernels
from compiled_kernels import Backend
from compiled_kernels.attention import AttentionParameters
from compiled_kernels.paged_attention import PagedKV
from compiled_kernels.quantized_attention import QuantizedKV, TokenGroups, hadamard_rotate
from workbench.batch import TokenBatch
from workbench.kv_cache.format import KVCacheSpec
from workbench.kv_cache.layer import CacheLayer
from workbench.kv_cache.page_formats import CodecPages, DensePages, GroupPages


class AttentionLayer(CacheLayer):
    """One layer's keys and values, each token stored in its format as it is computed."""

    def __init__(self, shape: KVCacheSpec, tokens: DensePages | CodecPages):
        self.tokens, self.group, self.num_value_columns = tokens, shape.group, shape.num_value_columns
        self.pages, self.traceable = {shape.group: tokens}, tokens.traceable

    def write(self, k: Tensor, v: Tensor, batch: TokenBatch, backend: Backend = Backend.EAGER) -> None:
        self.tokens.write(k, v, batch.slot_mapping[self.group], backend)

    def read(self, q: Tensor, batch: TokenBatch, parameters: AttentionParameters) -> PagedKV:
        return self.tokens.read(q, batch.page_tables[self.group], batch, parameters)

    def held(self, pages: list[int], count: int) -> tuple[Tensor, Tensor]:
        return self.tokens.held(pages, count)


class GroupedLayer(CacheLayer):
    """Quantized or encoded pages for old groups of tokens, and residual pages for all others and the sinks.

    What a query reads depends on its position alone (see `quantization_rule`), whether it is computed alone or in a
    chunk.

        write:   tokens -> residual pages;  groups that become old enough -> pages of groups
        attend:  pages of groups for old positions, residual pages for the others, one softmax

    A group is encoded when its last token is `residual_length` old, from the residual pages, whatever step it is.
    Drafts that are rejected leave a group at most encoded too early: no accepted query reads it before its last token
    is known, and by then it is encoded again.
    """

    def __init__(self, shape: KVCacheSpec, encoded: GroupPages, residual: DensePages, page_size: int):
        self.shape, self.quantization_rule, self.page_size = shape, shape.quantization_rule, page_size
        self.group, self.residual_group, self.rotates = shape.group, shape.residual_group, shape.format.rotate
        self.encoded, self.residual = encoded, residual
        self.pages = {shape.group: encoded, shape.residual_group: residual}

    def write(self, k: Tensor, v: Tensor, batch: TokenBatch, backend: Backend = Backend.EAGER) -> None:
        """Store k and v [token, kv_head, head_dim] of the batch's tokens, and quantize groups that become
        old enough."""
        if self.rotates:
            k, v = hadamard_rotate(k), hadamard_rotate(v)
        self.residual.write(k, v, batch.slot_mapping[self.residual_group], backend)
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

    def read(self, q: Tensor, batch: TokenBatch, parameters: AttentionParameters) -> QuantizedKV:
        rule, residual = self.quantization_rule, (self.residual.keys, self.residual.values)
        keys, values, table = self.encoded.read_groups(batch.page_tables[self.group], batch, parameters.mask, rule)
        return QuantizedKV(keys, values, *residual, table, batch.page_tables[self.residual_group], rule)

    def attend(self, q: Tensor, batch: TokenBatch, parameters: AttentionParameters, backend: Backend) -> Tensor:
        q = hadamard_rotate(q) if self.rotates else q
        # Outside a graph inductor compiles decodes itself.
        spans = batch.spans._replace(decode_only=batch.decode_only and backend is not Backend.INDUCTOR)
        kv = self.read(q, batch, parameters)
        mixed = compiled_kernels.quantized_attention(q, kv, spans, parameters, backend)
        return hadamard_rotate(mixed) if self.rotates else mixed


def quantize_layers(layers: Sequence[GroupedLayer], batch: TokenBatch) -> None:
    """Quantize the groups that this step makes old enough, in layers of one spec; they lie in residual pages."""
    first = layers[0]
    rows = first.groups_to_quantize(batch)
    if not rows:
        return
    device = first.residual.keys.device
    seqs, places, parts, unread = torch.tensor(rows, device=batch.token_ids.device).unbind(1)
    from_pages, to_pages = (
        batch.page_tables[table][seqs, places].long() for table in (first.residual_group, first.group)
    )
    groups = TokenGroups(
        first.quantization_rule.quant_group, *(each.to(device) for each in (from_pages, to_pages, parts, unread))
    )
    first.encoded.encode_groups([each.encoded for each in layers], [each.residual for each in layers], groups)
