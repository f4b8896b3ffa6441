"""Token recycling: the target's likeliest tokens after each token are kept, and drafts are trees grown from them.

Luo et al., 2024, "Turning Trash into Treasure", section 3, with an adjacency matrix M of the vocabulary by k:

    M[w]      =  the k likeliest tokens of p(. | x w)       at the last place where w was computed, accepted or not
    children  of a node w  =  M[w, 0], M[w, 1], ...

The paper's tree is static, found by search; here it grows best first, where the r-th candidate of a node costs r + 1
more than the node, up to the number of tokens wanted. The matrix is shared by all requests.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from workbench.parts import NO_DRAFT, Draft, Proposer, Sequence, SpeculationTarget, Verification


@dataclass
class TokenRecycling(Proposer):
    target: SpeculationTarget
    candidates: int = 6
    observed_top_k: int = field(init=False)
    matrix: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.observed_top_k = self.candidates

    def propose(self, sequences: Many[Sequence], counts: Many[int]) -> list[Draft]:
        return [self.tree(each.token_ids[-1], count) for each, count in zip(sequences, counts, strict=True)]

    def tree(self, last: int, count: int) -> Draft:
        ids: list[int] = []
        parents: list[int] = []
        waiting = [(rank + 1, -1, rank, token) for rank, token in enumerate(self.matrix.get(last, ()))]
        while waiting and len(ids) < count:
            cost, parent, _, token = heapq.heappop(waiting)
            place = len(ids)
            ids.append(token)
            parents.append(parent)
            for rank, after in enumerate(self.matrix.get(token, ())):
                heapq.heappush(waiting, (cost + rank + 1, place, rank, after))
        return Draft(tuple(ids), None, tuple(parents)) if ids else NO_DRAFT

    def observe(self, verifications: Many[Verification]) -> None:
        for sequence, draft, _, new, rows in verifications:
            last = sequence.token_ids[-len(new) - 1]
            self.matrix.update(zip((last, *draft.token_ids), rows, strict=True))
