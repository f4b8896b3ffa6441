"""Jacobi decoding: the guesses of a step are what the target made of the guesses of the step before.

Santilli et al., 2023, "Accelerating Transformer Inference for Translation via Parallel Decoding", algorithm 2. Greedy
decoding is the solution of y[i] = argmax p(. | x, y[0:i]); all of it is iterated at once from any start:

    y[i] at step t+1  =  argmax p(. | x, y[0:i] at step t)

The tokens up to the first that changes are final. Here a step computes the last known token and k guesses as a draft,
so that the target's verification decides what is final: the same, and lossless with sampling too. Each step accepts at
least one token; guesses beyond those the target made are the last known token repeated.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from workbench.parts import Draft, Proposer, Sequence, SpeculationTarget, Verification


@dataclass
class Jacobi(Proposer):
    target: SpeculationTarget
    observed_top_k: int = 1  # of each position its argmax
    guesses: dict[str, list[int]] = field(default_factory=dict)  # by request: for the positions after the text

    def propose(self, sequences: Many[Sequence], counts: Many[int]) -> list[Draft]:
        drafts = []
        for sequence, count in zip(sequences, counts, strict=True):
            known = self.guesses.get(sequence.request_id, [])[:count]
            drafts.append(Draft((*known, *[sequence.token_ids[-1]] * (count - len(known)))))
        return drafts

    def observe(self, verifications: Many[Verification]) -> None:
        for sequence, _, accepted, _, rows in verifications:
            made = [row[0] for row in rows]  # made[i]: of the position i after the last token known before the step
            self.guesses[sequence.request_id] = made[len(accepted) + 1 :]

    def forget(self, request_id: str) -> None:
        self.guesses.pop(request_id, None)
