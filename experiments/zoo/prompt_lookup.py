"""Prompt lookup: propose what followed the latest earlier occurrence of the text's last tokens.

Saxena, 2023, "Prompt Lookup Decoding". With the text x[0:n] and n-gram sizes from `max_ngram` down to `min_ngram`:

    p       =  max { p < n : x[p-m : p] = x[n-m : n] }        for the largest m for which there is one
    d[i]    =  x[p + i]                                        for i = 0 .. k-1, where x goes on into its own copy d

The engine has it too (`speculate: prompt_lookup`, with an index of n-grams in place of the search here); a law holds
that both propose the same.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

from workbench.parts import Draft, Proposer, Sequence, SpeculationTarget


@dataclass
class PromptLookup(Proposer):
    target: SpeculationTarget
    min_ngram: int = 2
    max_ngram: int = 4

    def propose(self, sequences: Many[Sequence], counts: Many[int]) -> list[Draft]:
        return [Draft(copy_of(each.token_ids, count, self.min_ngram, self.max_ngram))
                for each, count in zip(sequences, counts, strict=True)]  # fmt: skip


def copy_of(ids: list[int], count: int, min_ngram: int, max_ngram: int) -> tuple[int, ...]:
    """Return `count` tokens copied from behind the latest longest match, or none."""
    for size in range(min(max_ngram, len(ids) - 1), min_ngram - 1, -1):
        last = ids[-size:]
        for place in range(len(ids) - 1, size - 1, -1):
            if ids[place - size : place] == last:
                copied = list(ids)
                for index in range(count):
                    copied.append(copied[place + index])
                return tuple(copied[len(ids) :])
    return ()
