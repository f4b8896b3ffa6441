"""Which of its past a query reads packed, and which in full precision."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Settling:
    """Of `n` known tokens, complete groups of `group` that are at least `lag` old are settled: quantized for good.

        positions   0 .. first | first ................ settled(n) | settled(n) .... n
        read from     recent                  packed                     recent

    What a query at position t reads is settled by t alone: it is the last of t + 1 tokens.
    """

    group: int
    lag: int
    first: int = 0

    def settled(self, tokens: int) -> int:
        return max(0, (tokens - self.lag) // self.group * self.group)

    def settled_of(self, tokens: Tensor) -> Tensor:
        """`settled` of many."""
        return ((tokens - self.lag) // self.group * self.group).clamp_min(0)

    def packed(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether the query at one position reads the key at the other packed; positions broadcast."""
        return (key >= self.first) & (key < self.settled_of(query + 1))

    def recent_pages(self, size: int) -> int:
        """Pages that the unsettled tokens of a sequence lie in, at most: there are lag + group - 1 of them, and
        they begin at a multiple of the group, in pages of whole groups."""
        return -(-(size + self.lag - 1) // size)
