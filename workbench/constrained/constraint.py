"""Define a constraint: what a sampler asks before it samples a request's token, and what it does with that token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from workbench.constrained.closing import NodeBudget
from workbench.request import FinishReason

Taken = tuple[int | None, FinishReason | None]


class Constraint:
    """The constraint of one request, after the tokens that it has. `advance` moves it; nothing else does.

    logits -> rows without `banned(draft)` -> sampled token -> `advance(token)` -> the token of the output

    `left` is the number of tokens that may still come.
    """

    left = 1 << 30

    def banned(self, draft: Sequence[int] = ()) -> NDArray[np.bool_]:
        """Return the tokens that must not come next, and after each legal draft token: [1 + draft token, vocab].

        Called in a thread of its own, beside the forward pass; never at the same time as another method.
        """
        raise NotImplementedError

    def advance(self, token: int, budget: NodeBudget | None = None) -> Taken:
        """Take a sampled token, or another one in its place.

        Args:
            token: the sampled token.
            budget: work that may be done now; None: whatever it takes.

        Returns:
            The token that was taken; and the finish reason, where nothing may follow. No token with a reason: the
            answer ends before the token. Neither: the token waits for more work, and the next call goes on with it,
            whatever token that one is given.

        Raises:
            WorkbenchError: for a token that must not come.
        """
        raise NotImplementedError

    def legal_count(self, draft: Sequence[int]) -> int:
        """Return how many of these draft tokens may follow one another."""
        banned = self.banned(draft)
        return next((place for place, token in enumerate(draft) if banned[place, token]), len(draft))

    def work(self, budget: NodeBudget) -> None:
        """Do work that a token waits for, beside the forward pass."""


class Unconstrained(Constraint):
    """A free answer, behind a thought."""

    def __init__(self, vocab_size: int):
        self._vocab_size = vocab_size

    def banned(self, draft: Sequence[int] = ()) -> NDArray[np.bool_]:
        return np.zeros((1 + len(draft), self._vocab_size), np.bool_)

    def advance(self, token: int, budget: NodeBudget | None = None) -> Taken:
        return token, None
