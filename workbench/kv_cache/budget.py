"""Decide how many tokens a sequence may hold under eviction, and when it evicts. Integers only.

Eviction happens at positions that the text alone decides: a step computes up to such a position and no further. So it
is the same in a batch as alone, in chunks as at once, and with or without preemption.

    in decode:   | holds up to `tokens` | evicts down to `tokens_after_eviction` | a block of new tokens | evicts | ...
    otherwise:   | holds the whole prompt, evicts down to `tokens` at its end | holds all that is generated
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MIN_TOKENS = 2  # tokens: the newest, and a place for the next


@dataclass(frozen=True)
class EvictionBudget:
    """A limit on held tokens: `tokens`, or `ratio` of each prompt. With `in_decode` it holds at all times, otherwise
    for the prompt.

    `block` tokens are evicted at once; the default is an eighth of the budget. With a `spread` above 1 heads and layers
    share the budget unevenly: one of them may keep up to `spread` times as many tokens, and so many slots are held.
    """

    tokens: int | None = None
    ratio: float | None = None
    block: int | None = None
    in_decode: bool = True
    spread: float = 1.0

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.ratio is None):
            raise ValueError("a budget is in tokens or a ratio, one of both")
        if self.spread < 1 or (self.spread > 1 and self.in_decode):
            raise ValueError("a spread is at least 1, and more than 1 only of a budget for the prompt")

    def max_tokens(self, prompt: int) -> int:
        """Return the budget of a sequence whose prompt has `prompt` tokens."""
        if self.tokens is not None:
            return max(MIN_TOKENS, self.tokens)
        return max(MIN_TOKENS, math.ceil((self.ratio or 0) * prompt))

    def tokens_after_eviction(self, prompt: int) -> int:
        """Return the tokens that remain after an eviction, of a head on average."""
        most = self.max_tokens(prompt)
        if not self.in_decode:
            return most
        return most - max(1, min(self.block or most // 8, most // 2))

    def slots_after_eviction(self, prompt: int) -> int:
        """Return the slots that remain after an eviction, and with them the most tokens of one head."""
        kept = self.tokens_after_eviction(prompt)
        return kept if self.spread == 1 else max(kept, min(math.ceil(self.spread * kept), prompt - 1))

    def tokens_to_keep(self, prompt: int, computed: int, evicted: int) -> int | None:
        """Return the slots to keep if the sequence must evict before it computes more; None if it need not."""
        if self.in_decode:
            due = computed - evicted >= self.max_tokens(prompt)
        else:
            due = computed == prompt > self.max_tokens(prompt) and not evicted
        return self.slots_after_eviction(prompt) if due else None

    def tokens_until_eviction(self, prompt: int, computed: int, evicted: int) -> int | None:
        """Return the tokens that may be computed before the next eviction; None: any number."""
        if self.in_decode:
            return self.max_tokens(prompt) - (computed - evicted)
        return prompt - computed if computed < prompt else None

    def tokens_after_prompt(self, prompt: int, tokens: int) -> int:
        """Return the most tokens held after the prompt is computed, on the way to `tokens` known ones."""
        most = self.max_tokens(prompt)
        if self.in_decode:
            return min(tokens, most)
        return (prompt if prompt <= most else self.slots_after_eviction(prompt)) + tokens - prompt

    def peak_tokens(self, prompt: int, tokens: int) -> int:
        """Return the most tokens held at once on the way to `tokens` known ones."""
        return max(self.tokens_after_prompt(prompt, tokens), 0 if self.in_decode else min(prompt, tokens))
