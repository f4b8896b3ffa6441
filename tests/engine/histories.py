"""Histories of the scheduler, chosen by hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.engine.history import LAYOUTS, POLICIES, SIZE, STOPS, History


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
