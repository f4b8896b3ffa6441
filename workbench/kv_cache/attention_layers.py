"""Define cache layers for attention: all pages in one format, or separate pages for old groups of tokens and for all
other tokens.
"""

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
    """One layer's keys and values in one format; each token is stored in it as soon as it is computed."""

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
    """One layer's keys and values in two kinds of pages: quantized or encoded pages for old groups of tokens, and
    residual pages for all other tokens and the sinks.

    The pages that a query reads depend only on its position (see `quantization_rule`), not on how prompts are chunked.

        write:   tokens -> residual pages;  groups that become old enough -> pages of groups
        attend:  pages of groups for old positions, residual pages for the others, one softmax

    A group is encoded from the residual pages when its last token is `residual_length` tokens old, independent of
    steps. Rejected drafts can only cause a group to be encoded too early: no accepted query reads it before its last
    token is known, and by then it has been encoded again.
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
        """List the groups that become old enough to quantize in this step.

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
        # Outside of a graph, inductor compiles `decode` by itself.
        spans = batch.spans._replace(decode_only=batch.decode_only and backend is not Backend.INDUCTOR)
        kv = self.read(q, batch, parameters)
        mixed = compiled_kernels.quantized_attention(q, kv, spans, parameters, backend)
        return hadamard_rotate(mixed) if self.rotates else mixed


def quantize_layers(layers: Sequence[GroupedLayer], batch: TokenBatch) -> None:
    """Quantize, in several layers with the same spec, the groups of tokens that become old enough in this step."""
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
