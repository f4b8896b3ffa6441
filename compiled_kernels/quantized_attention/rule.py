"""The rule by which a query reads some positions quantized and others in full precision."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Settling:
    """The rule by which tokens are quantized for good: of `n` known tokens, complete groups of `quant_group` that are
    at least `residual_length` old.

        positions   0 .. sinks | sinks ......... quantized_until(n) | quantized_until(n) .... n
        read from     residual               quantized                        residual

    What a query at position t reads is decided by t alone: it is the last of t + 1 tokens.
    """

    group: int
    lag: int
    first: int = 0

    def settled(self, tokens: int) -> int:
        return max(0, (tokens - self.lag) // self.group * self.group)

    def settled_of(self, tokens: Tensor) -> Tensor:
        """Return `quantized_until` of many."""
        return ((tokens - self.lag) // self.group * self.group).clamp_min(0)

    def packed(self, query: Tensor, key: Tensor) -> Tensor:
        """Return whether the query at one position reads the key at the other quantized; positions broadcast."""
        return (key >= self.first) & (key < self.settled_of(query + 1))

    def recent_pages(self, size: int) -> int:
        """Return the pages that the residual tokens of a sequence lie in, at most: there are residual_length +
        quant_group - 1 of them, and they begin at a multiple of the group, in pages of whole groups."""
        return -(-(size + self.lag - 1) // size)
