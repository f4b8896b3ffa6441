"""Masks beside the forward pass: those that are taken are the ones for the draft that is sampled after all."""

from __future__ import annotations

from collections.abc import Sequence as Many
from threading import Event
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from workbench.constrained.constraint import Unconstrained
from workbench.constrained.masks import MaskWorker
from workbench.constrained.thought import ThoughtState, ThoughtThenAnswer
from workbench.request import Request, Sequence
from workbench.sampling.sampler import Sampler
from workbench.sampling.verify import Draft

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
        if self.fails:
            raise ValueError("no more")


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


class Slow(Unconstrained):
    """Computes masks from `begin` on; one that is asked for drafts meanwhile says so."""

    def __init__(self) -> None:
        super().__init__(8)
        self.begin, self.is_done = Event(), False

    def banned(self, draft: Many[int] = ()) -> np.ndarray:
        self.begin.wait()
        rows = [super(Slow, self).banned(draft) for _ in range(10_000)]
        self.is_done = True
        return rows[-1]

    def legal_count(self, draft: Many[int]) -> int:
        assert self.is_done, "two threads use one constraint"
        return len(draft)


def test_drafts_are_cut_once_the_masks_of_an_interrupted_step_are_there() -> None:
    sampler, slow, request = Sampler(), Slow(), Request("r", (1,))
    sequence = Sequence.from_request(request, 0)
    sampler.add(sequence, slow)
    sampler.start_masks([(sequence, ())])
    slow.begin.set()
    assert sampler.legal_drafts({"r": Draft((3,))})["r"].token_ids == (3,)


class Free(Unconstrained):
    """Notes what it is asked about."""

    def __init__(self, vocab_size: int):
        super().__init__(vocab_size)
        self.drafts: list[tuple[int, ...]] = []

    def banned(self, draft: Many[int] = ()) -> np.ndarray:
        self.drafts.append(tuple(draft))
        return super().banned(draft)


def test_an_answer_is_not_asked_about_a_thought_before_it() -> None:
    """The draft opens a thought and closes it; the answer's rows are those of its own tokens."""
    opening, closing, vocab = 1, 2, 8
    thought, answer = ThoughtState(opening, closing, 4, 0, lambda token: False), Free(vocab)
    constraint = ThoughtThenAnswer(thought, answer, 20, np.arange(vocab) == opening)
    rows = constraint.banned((opening, 5, closing, 6))
    assert answer.drafts == [(), (6,)]
    assert rows[0].tolist() == [token == closing for token in range(vocab)]
    assert rows[3].tolist() == rows[4].tolist() == [token in (opening, closing) for token in range(vocab)]
