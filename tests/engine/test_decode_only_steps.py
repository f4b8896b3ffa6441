"""Steps in which every request decodes are planned at once: the plans are the same as one by one."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest

from tests.engine import history, many_histories
from tests.engine.history import POLICIES
from tests.engine.line import Line
from tests.thorough import tries
from workbench.engine.telemetry import recorded
from workbench.request import Sequence
from workbench.scheduler.allocate import StepAllocation
from workbench.scheduler.plan import StepPlan
from workbench.scheduler.scheduler import Scheduler

KNOWN = [name for name in POLICIES if name != "wild"]


def played(seed: int, policy: str, patch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """Return the plans of a history as plain values: spans with the numbers of their pages, and decisions."""
    plans: list[tuple[Any, Any]] = []
    plan = Scheduler.plan

    def noted(self: Scheduler, *arguments: Any) -> StepPlan | None:
        planned = plan(self, *arguments)
        if planned is not None:
            spans = [(s.sequence.request_id, *s[1:], [[*pages] for pages in s.sequence.pages]) for s in planned.spans]
            moves = planned.transfers.swap_outs, planned.transfers.copies, planned.transfers.swap_ins
            made = planned.decisions, [recorded(each) for each in planned.policy_decisions]
            plans.append(((planned.step, spans, [[*each] for each in moves], planned.padding_rows), made))
        return planned

    with patch.context() as patched:
        patched.setattr(Scheduler, "plan", noted)
        patched.setattr(history, "POLICIES", [policy])
        many_histories.play(random.Random(seed))
    return plans


@pytest.mark.parametrize("policy", dict.fromkeys(KNOWN))
def test_decodes_at_once_are_decodes_one_by_one(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over random histories: the same spans, reasons, decisions, moves and page numbers, step by step. A steady policy
    that is not asked where all decode would have let them."""
    serve, at_once = StepAllocation.serve_running, list[bool]()

    def noted(self: StepAllocation, sequences: Iterable[Sequence]) -> None:
        at_once.append(sequences is self.decodes and len(self.decodes) > 1)
        serve(self, sequences)

    for seed in range(tries(72)):
        with monkeypatch.context() as patch:
            patch.setattr(StepAllocation, "serve_running", noted)
            quick = played(seed, policy, patch)
            patch.setattr(StepAllocation, "serve_running", lambda self, sequences: serve(self, [*sequences]))
            assert quick == played(seed, policy, patch)
            patch.setattr(Scheduler, "_has_nothing_to_decide", lambda self, step: False)
            assert [spans for spans, _ in quick] == [spans for spans, _ in played(seed, policy, patch)]
    assert sum(at_once) > 4 * tries(72) // 3


@pytest.mark.parametrize(("starvation_limit", "preempted"), [(5, "r1"), (1000, "r0")])
def test_the_oldest_past_the_starvation_limit_keeps_its_pages_longest(starvation_limit: int, preempted: str) -> None:
    """Among those that run on and on only the step's number changes, and with it the order of priorities."""
    line = Line({"kind": "priority", "starvation_limit": starvation_limit}, pages=9)
    for priority in (1, 0):
        line.submit(9, priority=priority)
    while not any("is preempted" in words for words in line.said):
        line.step()
    assert line.said[0].startswith(preempted)
