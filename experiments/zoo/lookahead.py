"""Lookahead decoding: Jacobi iteration whose intermediate results are kept as n-grams, and proposed when they fit.

Fu et al., 2024, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding". With y[i, t] the guess for
position i at step t, an iteration and the n-grams of size N along its trajectory are:

    y[i+1, t+1]  =  argmax p(. | x, y[<= i, t])
    g            =  (y[i, t-N+2], y[i+1, t-N+3], ..., y[i+N-2, t], y[i+N-1, t+1])        each the target's answer to
                    the one before it; the pool keeps g under its first token

A draft begins with the pool's latest n-gram that starts with the last known token, and goes on with the guesses. The
paper computes N - 1 levels of a window at once, under a mask of their own, beside all candidates of the pool; here one
level is computed in each step, the earlier ones are remembered, and one candidate is verified: one chain of tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from workbench.parts import Draft, Proposer, Sequence, SpeculationTarget, Verification


@dataclass
class Trajectory:
    """The guesses of a request: `steps[-1][i]` is the token that the last step computed at position i."""

    steps: deque[dict[int, int]]
    guesses: dict[int, int] = field(default_factory=dict)  # of the next step, by position
    pool: dict[int, tuple[int, ...]] = field(default_factory=dict)  # first token: the others of its latest n-gram


@dataclass
class Lookahead(Proposer):
    target: SpeculationTarget
    ngram: int = 4
    observed_top_k: int = 1
    kept: dict[str, Trajectory] = field(default_factory=dict)

    def propose(self, sequences: Many[Sequence], counts: Many[int]) -> list[Draft]:
        return [self.draft(each, count) for each, count in zip(sequences, counts, strict=True)]

    def draft(self, sequence: Sequence, count: int) -> Draft:
        ids, known = sequence.token_ids, self._of(sequence.request_id)
        candidate = known.pool.get(ids[-1], ())[:count]
        rest = range(len(ids) + len(candidate), len(ids) + count)
        return Draft((*candidate, *(known.guesses.get(position, ids[-1]) for position in rest)))

    def observe(self, verifications: Many[Verification]) -> None:
        for sequence, draft, _, new, rows in verifications:
            known, last = self._of(sequence.request_id), len(sequence.token_ids) - len(new) - 1
            known.steps.append(dict(enumerate((sequence.token_ids[last], *draft.token_ids), last)))
            for place in reversed(range(len(rows))):  # the nearest last: of two n-grams under one token it stays
                self._keep(known, last + place, rows[place][0])
            known.guesses = {last + 1 + i: row[0] for i, row in enumerate(rows)}

    def forget(self, request_id: str) -> None:
        self.kept.pop(request_id, None)

    def _keep(self, known: Trajectory, place: int, answer: int) -> None:
        """Enter the n-gram that ends with `answer`, as far back as the trajectory goes."""
        gram = [answer]
        for past in reversed(known.steps):
            if place not in past:
                break
            gram.insert(0, past[place])
            place -= 1
        known.pool[gram[0]] = tuple(gram[1:])

    def _of(self, request_id: str) -> Trajectory:
        return self.kept.setdefault(request_id, Trajectory(deque(maxlen=self.ngram - 1)))
