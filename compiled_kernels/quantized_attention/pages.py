"""Quantized and residual pages: the rule by which a query reads some positions quantized and others in full precision,
and the step that quantizes whole groups of tokens."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from compiled_kernels.memory import zero_pages
from compiled_kernels.quantized_attention.quantize import QuantFormat, QuantizedTensor, quantize, storage_shapes


@dataclass(frozen=True)
class QuantizationRule:
    """The rule by which tokens are quantized for good: of `n` known tokens, complete groups of `quant_group` that are
    at least `residual_length` old.

        positions   0 .. sinks | sinks ......... quantized_until(n) | quantized_until(n) .... n
        read from     residual               quantized                        residual

    What a query at position t reads is decided by t alone: it is the last of t + 1 tokens.
    """

    quant_group: int
    residual_length: int
    num_sink_tokens: int = 0

    def quantized_until(self, tokens: int) -> int:
        return max(0, (tokens - self.residual_length) // self.quant_group * self.quant_group)

    def quantized_until_each(self, tokens: Tensor) -> Tensor:
        """Return `quantized_until` of many."""
        return ((tokens - self.residual_length) // self.quant_group * self.quant_group).clamp_min(0)

    def is_quantized(self, query: Tensor, key: Tensor) -> Tensor:
        """Return whether the query at one position reads the key at the other quantized; positions broadcast."""
        return (key >= self.num_sink_tokens) & (key < self.quantized_until_each(query + 1))

    def residual_pages(self, size: int) -> int:
        """Return the pages that the residual tokens of a sequence lie in, at most: there are residual_length +
        quant_group - 1 of them, and they begin at a multiple of the group, in pages of whole groups."""
        return -(-(size + self.residual_length - 1) // size)


@dataclass(frozen=True)
class PageFormat:
    """The format of pages of `page_size` tokens of keys or values of width `head_dim` for `num_kv_heads` heads: keys
    have a scale for each channel of `numbers_per_scale` tokens, values one for each `numbers_per_scale` columns of a
    token."""

    format: QuantFormat
    is_keys: bool
    num_kv_heads: int
    head_dim: int
    page_size: int
    numbers_per_scale: int

    def empty(self, pages: int, dense: torch.dtype, device: str | torch.device = "cpu") -> QuantizedTensor:
        """Allocate zeroed pages; dense ones are of type `dense`. Raises ValueError where the format does not fit."""
        parts = [((pages, self.num_kv_heads, self.page_size, self.head_dim), dense)]
        if self.format != "dense":
            summed, kept = (self.head_dim, self.page_size) if self.is_keys else (self.page_size, self.head_dim)
            parts = storage_shapes(self.format, (pages, self.num_kv_heads), summed, kept, self.numbers_per_scale)
        return QuantizedTensor(*(zero_pages(shape, dtype, device) for shape, dtype in parts))


@dataclass(frozen=True)
class TokenGroups:
    """Groups of `group_size` tokens that are being quantized: the `parts`-th of their pages, from residual pages to
    quantized ones. The first `num_sink_tokens` tokens of each are always read in full precision and do not enter its
    scales."""

    group_size: int
    from_pages: Int[Tensor, " settling"]
    to_pages: Int[Tensor, " settling"]
    parts: Int[Tensor, " settling"]
    num_sink_tokens: Int[Tensor, " settling"]

    def gather(
        self, recent: Float[Tensor, "recent_page group offset dim"]
    ) -> Float[Tensor, "settling group token dim"]:
        """Gather the tokens to quantize."""
        tokens = recent.unflatten(2, (-1, self.group_size))[self.from_pages, :, self.parts]
        ignored = torch.arange(self.group_size, device=recent.device) < self.num_sink_tokens[:, None]
        return torch.where(ignored[:, None, :, None], tokens[:, :, -1:], tokens)

    def scatter(self, coded: QuantizedTensor, quantized: QuantizedTensor, keys: bool) -> None:
        """Scatter what `coded` made of the tokens into quantized pages, in place."""
        at, part = self.to_pages, self.parts
        if quantized.scales is None:
            quantized.codes.unflatten(2, (-1, self.group_size))[at, :, part] = coded.codes.to(quantized.codes.dtype)
        elif keys:
            quantized.codes.unflatten(3, (-1, self.group_size))[at, :, :, part] = coded.codes
        else:
            quantized.codes.unflatten(2, (-1, coded.codes.shape[2]))[at, :, part] = coded.codes
        for pages, run in zip(quantized[1:], coded[1:], strict=True):
            if pages is not None and run is not None and keys:
                pages[at, :, part] = run[:, :, 0]
            elif pages is not None and run is not None:
                pages.unflatten(3, (-1, self.group_size))[at, :, :, part] = run


def quantize_pages(
    recents: Sequence[Tensor], quantized: Sequence[QuantizedTensor], format: PageFormat, groups: TokenGroups
) -> None:
    """Quantize the same groups of several layers, whose pages have one format: coded together, as one tensor."""
    tokens = torch.stack([groups.gather(pages) for pages in recents])  # [layer, settling, group, token, dim]
    transposed = format.is_keys and format.format != "dense"
    coded = quantize(tokens.transpose(-1, -2) if transposed else tokens, format.format, format.numbers_per_scale)
    for layer, pages in enumerate(quantized):
        groups.scatter(coded.map(operator.itemgetter(layer)), pages, format.is_keys)
