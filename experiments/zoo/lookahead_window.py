"""Lookahead decoding with its window: Jacobi iterations of several steps and all n-grams that fit, in one tree.

Fu et al., 2024, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding", algorithm 2. A window has
N - 1 levels of W guesses; level l, column j stands l + j + 1 places after the last known token x, and sees x, the first
level up to its column, and its own column. As a tree, with the columns as branches of the first level:

    parent(0, j)  =  (0, j - 1)          parent(l, j)  =  (l - 1, j)
    new[j]        =  argmax p(. | path to (N - 2, j))
    pool          <- (w[0, j], ..., w[N-2, j], new[j])         an n-gram by its first token, for each column j
    w[l]          <- w[l + 1],  w[N-2] <- new                  then shifted by the tokens accepted beyond the first

Beside the window the tree has up to `candidates` n-grams of the pool that begin with x, the latest first. Where the
tree has no room for the window, at the end of a request, the window rests.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from workbench.parts import Draft, Proposer, Sequence, SpeculationTarget, Verification


@dataclass
class Iteration:
    levels: list[list[int]]  # N - 1 of W tokens
    pool: defaultdict[int, deque[tuple[int, ...]]]
    first: int | None = None  # place of the window in the last tree, which begins with n-grams


@dataclass
class LookaheadWindow(Proposer):
    target: SpeculationTarget
    window: int = 5
    ngram: int = 4
    candidates: int = 5
    observed_top_k: int = 1
    kept: dict[str, Iteration] = field(default_factory=dict)

    def propose(self, sequences: Many[Sequence], counts: Many[int]) -> list[Draft]:
        return [self.tree(each, count) for each, count in zip(sequences, counts, strict=True)]

    def tree(self, sequence: Sequence, count: int) -> Draft:
        now, ids, parents = self._of(sequence), list[int](), list[int]()
        for gram in list(now.pool[sequence.token_ids[-1]])[: count // (self.ngram - 1)]:
            parents += [-1, *range(len(ids), len(ids) + len(gram) - 1)]
            ids += gram
        now.first = None
        if len(ids) + self.window * len(now.levels) <= count:
            first = now.first = len(ids)
            parents += [-1, *range(first, first + (len(now.levels) * self.window) - 1)][: self.window]
            parents += range(first, first + (len(now.levels) - 1) * self.window)
            ids += [token for level in now.levels for token in level]
        return Draft(tuple(ids), None, tuple(parents))

    def observe(self, verifications: Many[Verification]) -> None:
        for sequence, draft, accepted, _, rows in verifications:
            now = self._of(sequence)
            if now.first is None or len(draft) < now.first + self.window * len(now.levels):
                continue
            new = [rows[1 + len(draft) - self.window + column][0] for column in range(self.window)]
            for column in reversed(range(self.window)):
                first, *others = (level[column] for level in now.levels)
                grams = now.pool[first]
                if (gram := (*others, new[column])) in grams:
                    grams.remove(gram)
                grams.appendleft(gram)
            shifted, last = [*now.levels[1:], new], sequence.token_ids[-1]
            now.levels = [[*level[len(accepted) :], *[last] * len(accepted)][: self.window] for level in shifted]

    def forget(self, request_id: str) -> None:
        self.kept.pop(request_id, None)

    def _of(self, sequence: Sequence) -> Iteration:
        if sequence.request_id not in self.kept:
            ids = sequence.token_ids  # the window begins with tokens of the text, as in the paper
            levels = [[ids[(level + column) % len(ids)] for column in range(self.window)]
                      for level in range(self.ngram - 1)]  # fmt: skip
            self.kept[sequence.request_id] = Iteration(levels, defaultdict(lambda: deque(maxlen=self.candidates)))
        return self.kept[sequence.request_id]
