"""More comes than can be served: all that wait pass the starvation limit, and a policy keeps its order."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from tests.engine.line import Line
from workbench.scheduler.policies import FCFS, Fair, Priority, ShortestPrompt

STEPS, PATIENCE = 600, 20


def waits(line: Line, *streams: tuple[int, dict[str, Any]]) -> list[list[int]]:
    """Steps that the requests of each stream, one every so many steps, waited until they began; of the first half."""
    came: list[dict[str, int]] = [{} for _ in streams]
    began: dict[str, int] = {}
    for step in range(STEPS):
        for (every, asked), mine in zip(streams, came, strict=True):
            if step % every == 0:
                mine[line.submit(**{"prompt": 8, "most": 6, **asked})] = step
        for name in line.step():
            began.setdefault(name, step)
    return [[began.get(name, STEPS) - at for name, at in mine.items() if at < STEPS // 2] for mine in came]


@pytest.mark.parametrize(
    ("policy", "first", "later"),
    [
        (Priority, {"priority": 0}, {"priority": 5}),
        (Fair, {"tenant": "light"}, {"tenant": "heavy"}),
        (ShortestPrompt, {"prompt": 4}, {"prompt": 8}),
    ],
)
def test_the_first_goes_first_when_all_are_past_the_starvation_limit(policy: Any, first: dict, later: dict) -> None:
    """Half of what can be served goes first, and waits little; three quarters come besides, and wait for long."""
    line = Line(policy(starvation_limit=PATIENCE))
    soon, late = waits(line, (3, first), (2, later))
    assert all(line.scheduler._steps - sequence.arrival_step > PATIENCE for sequence in line.scheduler.waiting[:20])
    assert statistics.median(soon) * 4 < statistics.median(late)
    assert max(soon) < PATIENCE * 2


@pytest.mark.parametrize("policy", [Priority, ShortestPrompt])
def test_the_oldest_have_a_share_however_many_go_first(policy: Any) -> None:
    """More than can be served goes first: of what order of arrival has to give, the others get a fourth."""
    streams = (1, {"priority": 0, "prompt": 4}), (60, {"priority": 5})
    (_, others), (_, in_order) = (waits(Line(each), *streams) for each in (policy(starvation_limit=PATIENCE), FCFS()))
    assert all(mine <= PATIENCE + 4 * (theirs + 6) for mine, theirs in zip(others, in_order, strict=True))
