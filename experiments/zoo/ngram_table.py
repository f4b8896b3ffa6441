"""N-gram table of a corpus: propose what most often followed the last tokens in texts known beforehand.

After He et al., 2023, "REST: Retrieval-Based Speculative Decoding". With count(g, w) the times that w follows the
n-gram g in the corpus, the draft after the text x backs off from the longest n-gram that the corpus knows:

    d  =  argmax over w of count(x[n-m : n], w)        for the largest m < order with any count, then again after x d

The paper looks the longest suffix up in a suffix array and drafts a tree of its continuations; here a table of n-grams
up to `order` gives one chain. The corpus is what the demo model was trained on: the first `megabytes` of the standard
library's modules in a fixed order, none of them held out. Without a tokenizer there is no corpus, and no draft.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence as Many
from functools import lru_cache
from typing import Any

from workbench.parts import Draft, Proposer, Sequence, SpeculationTarget, training_texts

Table = dict[tuple[int, ...], int]


class NgramTable(Proposer):
    def __init__(self, target: SpeculationTarget, order: int = 4, megabytes: float = 1.0):
        self.order = order
        self.table = {} if target.tokenizer is None else _corpus_table(target.tokenizer, order, megabytes)

    def propose(self, sequences: Many[Sequence], counts: Many[int]) -> list[Draft]:
        return [Draft(self.continuation(each.token_ids, n)) for each, n in zip(sequences, counts, strict=True)]

    def continuation(self, ids: list[int], count: int) -> tuple[int, ...]:
        last, found = ids[-self.order + 1 :], []
        while len(found) < count and (token := self._next(last)) is not None:
            found.append(token)
            last = [*last, token][-self.order + 1 :]
        return tuple(found)

    def _next(self, last: list[int]) -> int | None:
        known = (self.table.get(tuple(last[start:])) for start in range(len(last)))
        return next((token for token in known if token is not None), None)


def table_of(texts: Many[Many[int]], order: int) -> Table:
    """Return the likeliest next token after each n-gram of 1 to `order` - 1 tokens; the smallest id of equal ones."""
    counts: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for ids in texts:
        for place in range(1, len(ids)):
            for size in range(1, min(order - 1, place) + 1):
                counts[tuple(ids[place - size : place])][ids[place]] += 1
    return {gram: min(after, key=lambda token: (-after[token], token)) for gram, after in counts.items()}


@lru_cache(maxsize=2)
def _corpus_table(tokenizer: Any, order: int, megabytes: float) -> Table:
    return table_of([tokenizer.encode(text) for text in training_texts(round(megabytes * 2**20)).values()], order)
