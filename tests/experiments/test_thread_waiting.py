"""The rule by which a way of waiting is chosen."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from experiments.thread_waiting import BUSY_RATIO, QUIET_RATIO, Row, judge

ROUNDS = st.lists(st.floats(0.5, 100), min_size=3, max_size=3)


def rows(busy: int, **settings: list[float]) -> list[Row]:
    cell = {"busy": busy, "backend": "eager", "phase": "decode"}
    return [{**cell, "setting": name, "milliseconds": rounds} for name, rounds in settings.items()]


@given(ROUNDS, st.sampled_from([0, 1, 3]))
def test_the_best_of_a_cell_misses_nothing(rounds: list[float], busy: int) -> None:
    best, worse = judge(rows(busy, best=rounds, worse=[2.1 * max(rounds)] * 3))
    assert not best.quiet_misses and not best.busy_misses
    assert worse.quiet_misses == (("eager decode",) if busy == 0 else ())
    assert worse.busy_misses == (() if busy == 0 else (f"eager decode beside {busy}",))


def test_limits_are_those_of_the_rule() -> None:
    def misses(busy: int, best: list[float], value: float) -> bool:
        judged = judge(rows(busy, best=best, other=[value] * 3))[1]
        return bool(judged.quiet_misses or judged.busy_misses)

    steady, wide = [10.0, 10.0, 10.0], [9.0, 10.0, 12.0]
    assert not misses(0, steady, 10 * QUIET_RATIO) and misses(0, steady, 10.4)
    assert not misses(0, wide, 12.0) and misses(0, wide, 12.1)
    assert not misses(3, steady, 10 * BUSY_RATIO) and misses(3, steady, 20.1)
