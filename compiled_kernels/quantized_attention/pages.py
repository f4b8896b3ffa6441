"""Define which positions a query reads quantized and which in full precision, and quantize whole groups of tokens."""

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
    """The rule that decides which tokens are quantized: of a sequence's `n` tokens so far, every complete group of
    `quant_group` tokens whose tokens are all at least `residual_length` old.

        positions   0 .. sinks | sinks ......... quantized_until(n) | quantized_until(n) .... n
        read from     residual               quantized                        residual

    What a query at position t reads depends only on t: it is the last of t + 1 tokens.
    """

    quant_group: int
    residual_length: int
    num_sink_tokens: int = 0

    def quantized_until(self, tokens: int) -> int:
        return max(0, (tokens - self.residual_length) // self.quant_group * self.quant_group)

    def quantized_until_each(self, tokens: Tensor) -> Tensor:
        """Return `quantized_until` for each number in `tokens`."""
        return ((tokens - self.residual_length) // self.quant_group * self.quant_group).clamp_min(0)

    def is_quantized(self, query: Tensor, key: Tensor) -> Tensor:
        """Return whether a query at position `query` reads the key at position `key` in quantized form; positions
        broadcast.
        """
        return (key >= self.num_sink_tokens) & (key < self.quantized_until_each(query + 1))

    def residual_pages(self, size: int) -> int:
        """Return the largest number of pages that a sequence's residual tokens need. They are at most residual_length +
        quant_group - 1 tokens, begin at a multiple of the group, and lie in pages of whole groups."""
        return -(-(size + self.residual_length - 1) // size)


@dataclass(frozen=True)
class PageFormat:
    """The format of pages with `page_size` tokens of keys or values, `num_kv_heads` heads of width `head_dim`. Keys
    have a scale for each channel and `numbers_per_scale` tokens; values have a scale for each token and
    `numbers_per_scale` columns."""

    format: QuantFormat
    is_keys: bool
    num_kv_heads: int
    head_dim: int
    page_size: int
    numbers_per_scale: int

    def empty(self, pages: int, dense: torch.dtype, device: str | torch.device = "cpu") -> QuantizedTensor:
        """Allocate pages of zeros; unquantized pages are of type `dense`. Raises ValueError if the page size or head
        width does not fit the format.
        """
        parts = [((pages, self.num_kv_heads, self.page_size, self.head_dim), dense)]
        if self.format != "dense":
            summed, kept = (self.head_dim, self.page_size) if self.is_keys else (self.page_size, self.head_dim)
            parts = storage_shapes(self.format, (pages, self.num_kv_heads), summed, kept, self.numbers_per_scale)
        return QuantizedTensor(*(zero_pages(shape, dtype, device) for shape, dtype in parts))


@dataclass(frozen=True)
class TokenGroups:
    """Groups of `group_size` tokens to quantize: where each lies in residual pages (`from_pages`), where it goes in
    quantized pages (`to_pages`), and its index `parts` in both. The first `num_sink_tokens` tokens of each sequence are
    always read in full precision and do not affect scales.
    """

    group_size: int
    from_pages: Int[Tensor, " settling"]
    to_pages: Int[Tensor, " settling"]
    parts: Int[Tensor, " settling"]
    num_sink_tokens: Int[Tensor, " settling"]

    def gather(
        self, recent: Float[Tensor, "recent_page group offset dim"]
    ) -> Float[Tensor, "settling group token dim"]:
        """Gather the tokens of the groups from the residual pages."""
        tokens = recent.unflatten(2, (-1, self.group_size))[self.from_pages, :, self.parts]
        ignored = torch.arange(self.group_size, device=recent.device) < self.num_sink_tokens[:, None]
        return torch.where(ignored[:, None, :, None], tokens[:, :, -1:], tokens)

    def scatter(self, coded: QuantizedTensor, quantized: QuantizedTensor, keys: bool) -> None:
        """Write the quantized tokens `coded` into quantized pages, in place."""
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
    """Quantize the same groups of several layers with equal page formats, stacked into one tensor."""
    tokens = torch.stack([groups.gather(pages) for pages in recents])  # [layer, settling, group, token, dim]
    transposed = format.is_keys and format.format != "dense"
    coded = quantize(tokens.transpose(-1, -2) if transposed else tokens, format.format, format.numbers_per_scale)
    for layer, pages in enumerate(quantized):
        groups.scatter(coded.map(operator.itemgetter(layer)), pages, format.is_keys)
