"""Decide how many tokens a sequence may have in the cache, and when it evicts. Integers only.

Eviction happens at positions that depend only on the text, and a step never computes beyond such a position. So
eviction does not depend on batching, chunking or preemption.

    in decode:   | holds up to `tokens` | evicts down to `tokens_after_eviction` | a block of new tokens | evicts | ...
    otherwise:   | holds the whole prompt, evicts down to `tokens` at its end | holds all that is generated
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MIN_TOKENS = 2  # tokens: the newest, and room for the next


@dataclass(frozen=True)
class EvictionBudget:
    """A limit on the tokens that a sequence has in the cache: `tokens`, or the fraction `ratio` of the prompt's tokens.
    With `in_decode` it always applies, otherwise only at the end of the prompt.

    `block` tokens are evicted at once; the default is an eighth of the budget. With a `spread` above 1 heads and layers
    share the budget unevenly: one of them may keep up to `spread` times as many tokens, and that many slots are held.
    """

    tokens: int | None = None
    ratio: float | None = None
    block: int | None = None
    in_decode: bool = True
    spread: float = 1.0

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.ratio is None):
            raise ValueError("give a budget either in tokens or as a ratio")
        if self.spread < 1 or (self.spread > 1 and self.in_decode):
            raise ValueError("spread must be at least 1, and 1 if the budget holds in decode too")

    def max_tokens(self, prompt: int) -> int:
        """Return the budget in tokens of a sequence whose prompt has `prompt` tokens."""
        if self.tokens is not None:
            return max(MIN_TOKENS, self.tokens)
        return max(MIN_TOKENS, math.ceil((self.ratio or 0) * prompt))

    def tokens_after_eviction(self, prompt: int) -> int:
        """Return the number of tokens that a head keeps after an eviction, as a mean over the heads."""
        most = self.max_tokens(prompt)
        if not self.in_decode:
            return most
        return most - max(1, min(self.block or most // 8, most // 2))

    def slots_after_eviction(self, prompt: int) -> int:
        """Return the number of slots that are in use after an eviction: the largest number of tokens that one head may
        keep.
        """
        kept = self.tokens_after_eviction(prompt)
        return kept if self.spread == 1 else max(kept, min(math.ceil(self.spread * kept), prompt - 1))

    def tokens_to_keep(self, prompt: int, computed: int, evicted: int) -> int | None:
        """Return the number of slots to keep if the sequence must evict before it computes more tokens; None if it need
        not evict.
        """
        if self.in_decode:
            due = computed - evicted >= self.max_tokens(prompt)
        else:
            due = computed == prompt > self.max_tokens(prompt) and not evicted
        return self.slots_after_eviction(prompt) if due else None

    def tokens_until_eviction(self, prompt: int, computed: int, evicted: int) -> int | None:
        """Return the number of tokens that may be computed before the next eviction; None if there is no limit."""
        if self.in_decode:
            return self.max_tokens(prompt) - (computed - evicted)
        return prompt - computed if computed < prompt else None

    def tokens_after_prompt(self, prompt: int, tokens: int) -> int:
        """Return the maximum number of tokens in the cache from the prompt's end until the sequence has `tokens`
        tokens.
        """
        most = self.max_tokens(prompt)
        if self.in_decode:
            return min(tokens, most)
        return (prompt if prompt <= most else self.slots_after_eviction(prompt)) + tokens - prompt

    def peak_tokens(self, prompt: int, tokens: int) -> int:
        """Return the maximum number of tokens in the cache at any time until the sequence has `tokens` tokens."""
        return max(self.tokens_after_prompt(prompt, tokens), 0 if self.in_decode else min(prompt, tokens))
