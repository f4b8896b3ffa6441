"""A constraint of the user's own, with a state: which tokens may come hangs on all that came before."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def allowed(seed: int, before: Sequence[int]) -> set[int]:
    """Return a few tokens of text that may follow `before`, the end token 1 among them now and then."""
    draw = random.Random(f"{seed} {list(before)}")
    return {draw.randrange(10, 266) for _ in range(draw.randint(1, 4))} | ({1} if draw.random() < 0.1 else set())


class Walk:
    """Let an answer be one that `allowed` draws, of `most` tokens."""

    def __init__(self, seed: int, most: int = 1000):
        self.seed, self.most = seed, most
        self.taken: list[int] = []

    def start(self, tokens: Sequence[bytes], end_token_ids: frozenset[int]) -> None:
        self.vocab = len(tokens)

    def banned(self, ids: Sequence[int]) -> NDArray[np.bool_]:
        return ~np.isin(np.arange(self.vocab), [*allowed(self.seed, [*self.taken, *ids])])

    def advance(self, token: int) -> bool:
        self.taken.append(token)
        return len(self.taken) == self.most


class FailsAtThird(Walk):
    def banned(self, ids: Sequence[int]) -> Any:
        if len(self.taken) + len(ids) == 2:
            return self.wrong()
        return super().banned(ids)

    def wrong(self) -> Any:
        raise RuntimeError("no\nmore")


class RaggedAtThird(FailsAtThird):
    def wrong(self) -> Any:
        return [[True], [True, False]]


class ShortAtThird(FailsAtThird):
    def wrong(self) -> Any:
        return [True, False]
