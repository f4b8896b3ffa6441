"""Compute attention of packed spans over a cache in pages whose older keys and values are quantized (KIVI, Liu et al.
2024).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from compiled_kernels.attention import AttentionParameters, SpanContext, Spans, shown_pages
from compiled_kernels.backends import Backend, BackendError
from compiled_kernels.masks import CAUSAL, Mask
from compiled_kernels.paged_attention.api import attend_on, define_attention, gather_context
from compiled_kernels.quantized_attention.pages import QuantizationRule
from compiled_kernels.quantized_attention.quantize import QuantizedTensor, dequantize


class QuantizedKV(NamedTuple):
    """Keys and values in pages, of which most are quantized: keys [page, kv_head, dim, offset], values [page, kv_head,
    offset, dim]; dense pages of both are [page, kv_head, offset, dim]. A query at position t reads position p quantized
    if `rule` says so, from page `quantized_table[s, p // offset]`; otherwise from the residual page at the same place.
    """

    keys: QuantizedTensor
    values: QuantizedTensor
    residual_keys: Float[Tensor, "recent_page group offset dim"]
    residual_values: Float[Tensor, "recent_page group offset dim"]
    quantized_table: Int[Tensor, "seq packed_held"]
    residual_table: Int[Tensor, "seq recent_held"]
    rule: QuantizationRule
    # places of the quantized pages in the context, if only some are listed
    places: Int[Tensor, "seq packed_held"] | None = None

    @property
    def flat(self) -> tuple[Any, ...]:
        """Return the tensors, and the numbers of the rule, in the order of the operator's schema."""
        assert self.places is None
        rule = self.rule
        return *self.keys, *self.values, *self[2:6], rule.quant_group, rule.residual_length, rule.num_sink_tokens

    @classmethod
    def unflat(cls, *flat: Any) -> QuantizedKV:
        return cls(
            QuantizedTensor(*flat[:3]), QuantizedTensor(*flat[3:6]), *flat[6:10], rule=QuantizationRule(*flat[10:])
        )

    @property
    def tables(self) -> tuple[Tensor, ...]:
        return self.quantized_table, self.residual_table

    @property
    def chosen(self) -> None:
        """Return None: page selection is not supported."""

    def first(self, seqs: int) -> QuantizedKV:
        return self._replace(quantized_table=self.quantized_table[:seqs], residual_table=self.residual_table[:seqs])

    def gather(
        self, seq: int, context: int, rows: slice, dtype: torch.dtype | None = None, mask: Mask = CAUSAL
    ) -> SpanContext:
        """Gather the keys and values that a span reads. A position that some queries read quantized and others in full
        precision is returned twice.
        """
        rule, device, size = self.rule, self.residual_keys.device, self.residual_keys.shape[2]
        tokens = rows.stop - rows.start
        exact = dtype or torch.promote_types(self.residual_keys.dtype, torch.float32)
        settled, unsettled = rule.quantized_until(context), rule.quantized_until(context - tokens + 1)
        shown = shown_pages(mask, context, tokens, size, device)
        pages = torch.arange(-(-settled // size), device=device)
        pages = pages if shown is None else shown[shown < len(pages)]
        old = (pages[:, None] * size + torch.arange(size, device=device)).flatten()
        old = old[: int((old < settled).sum())]
        runs = [(0, min(rule.num_sink_tokens, unsettled)), (unsettled, context)]
        recent = torch.cat([torch.arange(*run, device=device) for run in runs])
        stays = slice(None) if shown is None else torch.isin(recent // size, shown)
        positions = torch.cat([old, recent[stays]])
        is_quantized = torch.arange(len(positions), device=device) < len(old)
        found = []
        for quantized, residual, are_keys in (
            (self.keys, self.residual_keys, True),
            (self.values, self.residual_values, False),
        ):
            numbers = dequantized_pages(quantized, self.quantized_table[seq, pages].long(), exact, are_keys)
            rest = torch.cat([_residual_run(residual, self.residual_table[seq], *run) for run in runs])
            numbers = rearrange(numbers, "page group offset dim -> (page offset) group dim")[: len(old)]
            found.append(torch.cat([numbers, rest[stays].to(exact)]))
        queries = torch.arange(context - tokens, context, device=device)[:, None]
        readable = (rule.is_quantized(queries, positions) == is_quantized) & (positions <= queries)
        k, v = found
        return SpanContext(k, v, queries, positions, readable)

    def blocks(self, lengths: Tensor, dtype: torch.dtype) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Return the contents of the quantized pages, then of the residual pages that are read (see
        `KVPages.blocks`).
        """
        size, lengths, table = self.residual_keys.shape[2], lengths.long(), self.quantized_table.long()
        places, pages = self._residual(lengths.view(-1))
        quantized = (
            dequantized_pages(self.keys, table, dtype, True),
            dequantized_pages(self.values, table, dtype, False),
        )
        residual = self.residual_keys[pages].to(dtype), self.residual_values[pages].to(dtype)
        every = torch.arange(table.shape[1], device=table.device)[None].expand(len(table), -1)
        every = every if self.places is None else self.places
        found = []
        for (k, v), at, is_quantized in ((quantized, every, True), (residual, places, False)):
            positions = at[..., None] * size + torch.arange(size, device=table.device)
            read = (positions < lengths) & (self.rule.is_quantized(lengths - 1, positions) == is_quantized)
            found.append((k, v, positions, read))
        return found

    @property
    def layout(self) -> tuple[int, QuantizationRule]:
        return self.residual_keys.shape[2], self.rule

    def with_pages(self, pages: Tensor, places: Tensor) -> QuantizedKV:
        return self._replace(quantized_table=pages, places=places)

    def _residual(self, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return the places [seq, few] of pages read in full precision, and the pages: the end of the context, and the
        first positions if they stay unquantized. A place that would be listed twice, or lies beyond the table, is
        replaced by one past the table."""
        rule, table, size = self.rule, self.residual_table, self.residual_keys.shape[2]
        begin = rule.quantized_until_each(lengths) // size
        places = begin[:, None] + torch.arange(rule.residual_pages(size), device=table.device)
        if rule.num_sink_tokens:
            front = torch.arange(-(-rule.num_sink_tokens // size), device=table.device)[None].expand(len(lengths), -1)
            front = torch.where(front < begin[:, None], front, table.shape[1])
            places = torch.cat([front, places], dim=1)
        beyond = places >= table.shape[1]
        pages = table.long().gather(1, torch.where(beyond, 0, places))
        # No context reaches a place past the table, so its contents are masked by position.
        return torch.where(beyond, table.shape[1], places), pages


def dequantized_pages(pages: QuantizedTensor, table: Tensor, dtype: torch.dtype, are_keys: bool) -> Tensor:
    """Return whole pages as numbers [..., kv_head, offset, dim]; `table` [...] has their page numbers."""
    numbers = dequantize(pages.map(lambda part: part[table]), dtype)
    return numbers.transpose(-1, -2) if are_keys and pages.kind != "dense" else numbers


def _residual_run(pages: Tensor, table: Tensor, begin: int, end: int) -> Tensor:
    """Return positions [begin, end) as they lie in full precision."""
    first = begin // pages.shape[2]
    skipped = first * pages.shape[2]
    return gather_context(pages, table[first:], end - skipped)[begin - skipped :]


def check_sinks(operator: str, backend: str, rule: QuantizationRule, window: int, sinks: int) -> None:
    """Raise BackendError if a window's sinks are quantized, because no handwritten kernel reads them."""
    if window and sinks > rule.num_sink_tokens:
        kept = f"the first {rule.num_sink_tokens} positions are"
        raise BackendError(f"{operator}: backend {backend} keeps a window's {sinks} sinks in full precision; {kept}")


QUANTIZED_ATTENTION = define_attention(
    "quantized_attention",
    QuantizedKV,
    "Tensor key_codes, Tensor? key_scales, Tensor? key_minima, Tensor value_codes, Tensor? value_scales,"
    " Tensor? value_minima, Tensor residual_keys, Tensor residual_values, Tensor quantized_table,"
    " Tensor residual_table, int quant_group, int residual_length, int num_sink_tokens",
)


def quantized_attention(
    q: Float[Tensor, "token head dim"],
    kv: QuantizedKV,
    spans: Spans,
    parameters: AttentionParameters,
    backend: Backend = Backend.EAGER,
) -> Float[Tensor, "token head dim"]:
    """Compute softmax(scale q kᵀ) v over quantized and residual keys and values; in other respects like
    `paged_attention`.

    Raises:
        BackendError: for unsupported arguments: triton and mlir support windows with unquantized sinks, and no score
            functions; mlir does not support dense keys with quantized values.
    """
    return attend_on(QUANTIZED_ATTENTION, backend, q, kv, spans, parameters)
