"""The rule by which a query reads some positions quantized and others in full precision."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


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
