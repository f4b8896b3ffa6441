"""SpecInfer: the drafts of several drafters are merged into one tree, which the target verifies in one step.

Miao et al., 2023, "SpecInfer", definitions 3.1 and 3.2 and section 4: a token tree has a sequence s(u) at each node u,
the path to it from the root, and a merge of trees has all their sequences and no others:

    { s(u) : u in merge(T1, ..., Tm) }  =  { s(u) : u in T1 }  union  ...  union  { s(u) : u in Tm }

Here the drafters are a small model, some of the target's own layers, and the text's n-grams. Tree attention and the
verification along the tree are the engine's. Tokens that a model drew are verified as if they were certain, which keeps
the target's distribution; the paper's multi-step sampling accepts drawn tokens more often.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from workbench.parts import NO_DRAFT, Draft, Proposer, Sequence, SpeculationTarget


@dataclass
class SpecInfer(Proposer):
    target: SpeculationTarget
    model: str = "demo-draft"
    skipped: int = 2  # of the target's layers before the last, for the second drafter
    ngram: int = 3
    drafters: list[Proposer] = field(init=False)

    def __post_init__(self) -> None:
        last = len(self.target.spec.layers) - 1
        kept = (*range(last - self.skipped), last)
        tokens = {"num_speculative_tokens": max(1, self.target.settings.num_speculative_tokens // 2)}
        self.drafters = [self.target.draft_model(model=self.model, **tokens),
                         self.target.draft_model(model="target", layers=kept, **tokens)]  # fmt: skip

    def propose(self, sequences: Many[Sequence], counts: Many[int]) -> list[Draft]:
        half = [-(-count // 2) for count in counts]
        drafts = [drafter.propose(sequences, half) for drafter in self.drafters]
        copies = [self.copied(each.token_ids, count) for each, count in zip(sequences, half, strict=True)]
        chains = zip(*([draft.token_ids for draft in each] for each in drafts), copies, strict=True)
        return [merge(each, count) for each, count in zip(chains, counts, strict=True)]

    def copied(self, ids: list[int], count: int) -> tuple[int, ...]:
        last = ids[-self.ngram :]
        ends = (end for end in range(len(ids) - 1, self.ngram - 1, -1) if ids[end - self.ngram : end] == last)
        return tuple(ids[end : end + count]) if (end := next(ends, None)) else ()

    def forget(self, request_id: str) -> None:
        for drafter in self.drafters:
            drafter.forget(request_id)


def merge(chains: Many[tuple[int, ...]], count: int) -> Draft:
    """Return the tree of all chains' beginnings, of `count` tokens at most; earlier chains come first."""
    places: dict[tuple[int, ...], int] = {(): -1}  # by path
    ids: list[int] = []
    parents: list[int] = []
    for chain in chains:
        for size in range(1, len(chain) + 1):
            path = chain[:size]
            if path not in places and len(ids) < count and path[:-1] in places:
                places[path] = len(ids)
                ids.append(path[-1])
                parents.append(places[path[:-1]])
    return Draft(tuple(ids), None, tuple(parents)) if ids else NO_DRAFT
