"""Define a constraint: it masks a request's logits before sampling, and accepts or replaces the sampled token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from workbench.constrained.closing import NodeBudget
from workbench.request import FinishReason

Taken = tuple[int | None, FinishReason | None]


class Constraint:
    """The constraint of one request, after its tokens so far. Only `advance` changes its state.

    logits -> rows without `banned(draft)` -> sampled token -> `advance(token)` -> the token of the output

    `left` is the number of tokens that may still follow.
    """

    left = 1 << 30

    def banned(self, draft: Sequence[int] = ()) -> NDArray[np.bool_]:
        """Return the forbidden next tokens, now and after each legal draft token: [1 + draft token, vocab].

        Called in a separate thread during the forward pass, never concurrently with another method.
        """
        raise NotImplementedError

    def advance(self, token: int, budget: NodeBudget | None = None) -> Taken:
        """Accept a sampled token, or replace it by another.

        Args:
            token: the sampled token.
            budget: the work allowed now; None: no limit.

        Returns:
            The accepted token, and a finish reason if the answer ends. No token but a reason: the answer ends before
            the token. Neither: the token waits for more work; the next call continues with it and ignores its own
            argument.

        Raises:
            WorkbenchError: for a forbidden token.
        """
        raise NotImplementedError

    def legal_count(self, draft: Sequence[int]) -> int:
        """Return the length of the longest legal prefix of `draft`."""
        banned = self.banned(draft)
        return next((place for place, token in enumerate(draft) if banned[place, token]), len(draft))

    def work(self, budget: NodeBudget) -> None:
        """Continue the work that a sampled token waits for, within `budget`. Called during the forward pass."""


class Unconstrained(Constraint):
    """A constraint that allows every token: for a free answer after a thought."""

    def __init__(self, vocab_size: int):
        self._vocab_size = vocab_size

    def banned(self, draft: Sequence[int] = ()) -> NDArray[np.bool_]:
        return np.zeros((1 + len(draft), self._vocab_size), np.bool_)

    def advance(self, token: int, budget: NodeBudget | None = None) -> Taken:
        return token, None
