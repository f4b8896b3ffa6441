"""Scheduler, pages, prefix index and host under random histories and any policy: integers only, every read checked.

For a soak, ten thousand of them in a minute: python -m tests.engine.many_histories
"""

from __future__ import annotations

import os

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.engine import many_histories
from tests.engine.history import LAYOUTS, POLICIES, SIZE, STOPS, History
from tests.thorough import tries
from workbench.request import FinishReason, Sequence
from workbench.scheduler.scheduler import Scheduler


class Histories(History, RuleBasedStateMachine):
    """In which hypothesis chooses what happens."""

    begin = initialize(
        policy=st.sampled_from(POLICIES), tables=st.sampled_from(LAYOUTS), pages=st.integers(10, 16),
        prefix=st.booleans(), saves=st.booleans(),
        host=st.sampled_from([0, 6, 20]), ttl=st.sampled_from([None, 5.0]), seed=st.integers(0, 10**6),
    )(History.begin)  # fmt: skip
    submit = rule(
        shared=st.one_of(st.integers(0, 30), st.integers(1, 6).map(lambda pages: pages * SIZE)),
        own=st.one_of(st.integers(0, 9), st.just(1)), most=st.integers(1, 12),
        samples=st.sampled_from([1, 1, 2, 3, 6]), beams=st.booleans(),
        salt=st.sampled_from(["", "", "b"]), which=st.integers(0, 1),
    )(History.submit)  # fmt: skip
    step = rule(steps=st.integers(1, 6))(History.step)
    stop = precondition(lambda self: self.open)(
        rule(which=st.integers(0, 30), reason=st.sampled_from(STOPS))(History.stop)
    )
    evict = precondition(lambda self: self.manager.prefix_cache is not None)(
        rule(table=st.integers(0, 2), count=st.integers(1, 4), everything=st.sampled_from([False, False, False, True]))(
            History.evict
        )
    )
    wait = rule(seconds=st.floats(0, 4))(History.wait)
    check = invariant()(History.check)

    def teardown(self) -> None:
        if hasattr(self, "memory"):
            self.finish()


TestHistories = Histories.TestCase
HISTORIES = int(os.environ.get("HISTORIES", "300"))
TestHistories.settings = settings(max_examples=tries(HISTORIES), stateful_step_count=30, deadline=None)


def test_many_histories(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver without hypothesis finds nothing; and a planted bug, by a seed that plays the same history again."""
    assert many_histories.run(range(60)) == {}
    finish = Scheduler.finish

    def keeps_pages(self: Scheduler, sequence: Sequence, reason: FinishReason) -> list[list[int]]:
        """A planted bug: a request that ends before its children's prefill keeps a page for ever."""
        for pool, pages in zip(self.pools, sequence.pages, strict=False):
            if reason is FinishReason.CANCELLED and any(pages):
                pool.acquire([next(page for page in pages if page)])
        return finish(self, sequence, reason)

    monkeypatch.setattr(Scheduler, "finish", keeps_pages)
    failed = many_histories.run(range(60))
    assert failed
    seed, error = next(iter(failed.items()))
    assert many_histories.run([seed]) == {seed: error}
