"""Limits follow the machine, and waiting ends with the event or with what would bring it about."""

from __future__ import annotations

import pytest

from tests.patience import MAX_SECONDS, MIN_SCALE, limit, scale, until


def test_limits_are_generous_and_follow_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert scale() >= MIN_SCALE and limit(3) == 3 * scale()
    monkeypatch.setenv("WORKBENCH_TESTS_SCALE", "70")
    assert limit(2) == 140 and limit(100) == MAX_SECONDS < 600


def test_waiting_ends_with_the_event_or_with_what_would_bring_it_about() -> None:
    looked = iter([False, False, True])
    until(lambda: next(looked))
    with pytest.raises(AssertionError, match="has ended"):
        until(lambda: False, lambda: False)
    ended = iter([False, True])  # it came with its last act
    until(lambda: next(ended), lambda: False)
