"""Suffix decoding: draft along a suffix tree of all texts so far, as far as the match and its statistics justify.

Oliaro et al., 2024, "SuffixDecoding". With count(g) the times that the token sequence g occurred in this request or in
earlier ones, s the longest suffix of the text (at most `depth` tokens) that occurred before, and k the tokens wanted:

    D(w | g)  =  count(g w) / count(g)
    d[i]      =  argmax over w of D(w | s d[0:i])
    stop      where  i >= factor |s|,  or  D(d[0] | s) ... D(d[i] | s d[0:i]) < least

The paper keeps a tree of all earlier outputs beside one of the request, and drafts a tree of the best nodes; here one
table of counts by suffix serves both, prompts included, and the draft is the greedy path.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from workbench.parts import Draft, Proposer, Sequence, SpeculationTarget

Gram = tuple[int, ...]


@dataclass
class SuffixDecoding(Proposer):
    target: SpeculationTarget
    depth: int = 8
    factor: float = 2.0
    least: float = 0.1
    after: defaultdict[Gram, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    entered: dict[str, int] = field(default_factory=dict)  # tokens of a request that are counted

    def propose(self, sequences: Many[Sequence], counts: Many[int]) -> list[Draft]:
        for each in sequences:
            self.enter(each)
        return [Draft(self.path(each.token_ids, count)) for each, count in zip(sequences, counts, strict=True)]

    def enter(self, sequence: Sequence) -> None:
        ids = sequence.token_ids
        for place in range(self.entered.get(sequence.request_id, 1), len(ids)):
            for size in range(1, min(self.depth, place) + 1):
                self.after[tuple(ids[place - size : place])][ids[place]] += 1
        self.entered[sequence.request_id] = len(ids)

    def path(self, ids: list[int], count: int) -> Gram:
        known = (tuple(ids[-size:]) for size in range(min(self.depth, len(ids)), 0, -1))
        suffix = next((gram for gram in known if gram in self.after), ())
        found, chance = [], 1.0
        while len(found) < min(count, int(self.factor * len(suffix))):
            last = tuple([*suffix, *found][-self.depth :])
            while last and last not in self.after:
                last = last[1:]
            if not last:
                break
            following = self.after[last]
            token = min(following, key=lambda each: (-following[each], each))
            chance *= following[token] / following.total()
            if chance < self.least:
                break
            found.append(token)
        return tuple(found)

    def forget(self, request_id: str) -> None:
        self.entered.pop(request_id, None)
