"""Ownership of pages under random histories."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.thorough import tries
from workbench.errors import WorkbenchError
from workbench.kv_cache.pages import NULL_PAGE, PagePool, pages_for

PAGES = 7


class Ownership(RuleBasedStateMachine):
    """Holders take, share and give back; the model is a plain list of who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(PAGES, 4)
        self.held: list[list[int]] = []

    @rule(count=st.integers(0, PAGES + 2))
    def allocate(self, count: int) -> None:
        if count > self.pool.num_free:
            with pytest.raises(ValueError, match="free"):
                self.pool.allocate(count)
            return
        pages = self.pool.allocate(count)
        others = {page for holder in self.held for page in holder}
        assert not others & set(pages), "a held page was handed out"
        self.held.append(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        pages = data.draw(st.sampled_from(self.held))
        self.pool.acquire(pages)
        self.held.append(list(pages))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        freed = self.pool.release(pages)
        still = {page for holder in self.held for page in holder}
        assert sorted(freed) == sorted(set(pages) - still)

    @invariant()
    def free_and_held_are_all(self) -> None:
        counts = Counter(page for holder in self.held for page in holder)
        assert self.pool.num_used == len(counts)
        assert self.pool.num_free + self.pool.num_used == PAGES
        assert NULL_PAGE not in counts
        for page in range(1, PAGES + 1):
            assert self.pool.ref_count(page) == counts[page]


TestOwnership = Ownership.TestCase
TestOwnership.settings = settings(max_examples=tries(150), stateful_step_count=30)


@given(st.integers(0, 10_000), st.integers(1, 512))
def test_pages_for_is_the_least_that_holds(tokens: int, size: int) -> None:
    pages = pages_for(tokens, size)
    assert pages * size >= tokens > (pages - 1) * size or tokens == pages == 0


@given(st.permutations(range(1, PAGES + 1)))
def test_pages_come_in_the_order_asked(order: list[int]) -> None:
    assert PagePool(PAGES, 4, order).allocate(PAGES) == list(order)


def test_misuse_is_refused() -> None:
    pool = PagePool(2, 4)
    with pytest.raises(ValueError, match="not referenced"):
        pool.release([1])
    with pytest.raises(ValueError, match="not referenced"):
        pool.acquire([NULL_PAGE])
    page = pool.allocate(1)
    with pytest.raises(ValueError, match="not referenced"):
        pool.release(page * 2)
    with pytest.raises(WorkbenchError):
        PagePool(0, 4)
