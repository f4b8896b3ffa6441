"""Masks beside the forward pass: those that are taken are the ones for the draft that is sampled after all."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from workbench.constrained.masks import MaskWorker

DRAFTS = st.lists(st.integers(0, 2), max_size=2).map(tuple)


class Counted:
    """A constraint that forbids what its draft holds, and says how often it was asked."""

    def __init__(self, fails: bool):
        self.fails, self.asked, self.searched = fails, 0, 0

    def banned(self, draft: tuple[int, ...]) -> np.ndarray:
        self.asked += 1
        if self.fails:
            raise ValueError("no more")
        return np.array([[token in draft for token in range(3)]])

    def work(self, budget: Any) -> None:
        self.searched += 1


@given(st.lists(st.tuples(DRAFTS, DRAFTS, st.booleans(), st.booleans()), max_size=4), st.booleans())
def test_rows_are_those_of_the_draft_that_is_taken(drafts: list, cleared: bool) -> None:
    """A draft may be cut between the start and the sampling; what was not started is computed when it is taken."""
    worker, cases = MaskWorker(), [(Counted(fails), *each) for *each, fails in drafts]
    worker.start([(each, draft) for each, draft, _, started in cases if started])  # type: ignore[misc] (stands for one)
    if cleared:
        worker.clear()
    for each, begun, draft, started in cases:
        found: Any = worker.take(each, draft)  # type: ignore[arg-type] (as above)
        if each.fails:
            assert "no more" in found
        else:
            assert found.tolist() == [[token in draft for token in range(3)]]
        if not cleared:
            assert (each.asked, each.searched) == (1 + (started and begun != draft), int(started))
