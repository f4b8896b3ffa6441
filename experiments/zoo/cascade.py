"""Cascade of drafts: the text's own n-grams where they match, a draft model for the first tokens where they do not.

After Chen et al., 2023, "Cascade Speculative Drafting". Drafters are ordered by their cost, and the i-th token of a
draft comes from the cheapest that is worth it at that place (the horizontal cascade, with a statistical drafter last):

    d[i]  =  x[m + i]                  where the last n tokens of x d occurred before, ending at m
    d[i]  =  argmax or draw of q(. | x, d[0:i])        otherwise, for i < model_tokens

A sequence whose last tokens occurred before costs no step of the draft model. The paper also lets the cheap drafter
draft for the draft model (the vertical cascade), which is left out here.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from workbench.parts import Draft, Proposer, Sequence, SpeculationTarget


@dataclass
class Cascade(Proposer):
    target: SpeculationTarget
    model: str = "demo-draft"
    model_tokens: int = 3
    ngram: int = 3
    drafter: Proposer = field(init=False)

    def __post_init__(self) -> None:
        self.drafter = self.target.draft_model(model=self.model, num_speculative_tokens=self.model_tokens)

    def propose(self, sequences: Many[Sequence], counts: Many[int]) -> list[Draft]:
        drafts = [Draft(self.copied(each.token_ids, count)) for each, count in zip(sequences, counts, strict=True)]
        missing = [place for place, draft in enumerate(drafts) if not len(draft)]
        wanted = [min(self.model_tokens, counts[place]) for place in missing]
        found = self.drafter.propose([sequences[place] for place in missing], wanted) if missing else []
        for place, draft in zip(missing, found, strict=True):
            drafts[place] = draft
        return drafts

    def copied(self, ids: list[int], count: int) -> tuple[int, ...]:
        last = ids[-self.ngram :]
        for end in range(len(ids) - 1, self.ngram - 1, -1):
            if ids[end - self.ngram : end] == last:
                return tuple(ids[end : end + count])
        return ()

    def forget(self, request_id: str) -> None:
        self.drafter.forget(request_id)
