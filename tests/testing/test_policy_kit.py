"""The kit for scheduling policies: what it says of ours, and of ones that break a law each."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from workbench.errors import WorkbenchError
from workbench.kv_cache.pages import PagePool
from workbench.request import Sequence
from workbench.scheduler.allocate import StepAllocation
from workbench.scheduler.policies import BUILT_IN_POLICIES, FCFS
from workbench.scheduler.policy import SchedulerDecision, SchedulerState, Turn
from workbench.testing import check_policy, policies
from workbench.testing.law import ConformityReport


def broken(report: ConformityReport) -> list[str]:
    return [law.law for law in report.laws if not law.ok]


def try_only(law: str, patch: pytest.MonkeyPatch) -> None:
    """Leave the other laws out of the kit."""
    for laws, name in ((policies.LAWS, str), (policies.COMPETING_REQUESTS, policies.STARVATION_LAW.format)):
        for other in [each for each in laws if name(each) != law]:
            patch.delitem(laws, other)


@pytest.mark.parametrize("kind", ["continuous", "static"])
@pytest.mark.parametrize("name", BUILT_IN_POLICIES)
def test_our_policies_keep_every_law(name: str, kind: str) -> None:
    patience = {"starvation_limit": 60} if "starvation_limit" in BUILT_IN_POLICIES[name].model_fields else {}
    report = check_policy({"kind": name, **patience}, examples=15, kind=kind)
    assert report.passed and len(report.laws) == 14, str(report)


def negative(state: SchedulerState) -> SchedulerDecision:
    """Turns that take tokens away."""
    return SchedulerDecision([state.decodes, [Turn(entry, -1) for entry in (*state.prefills, *state.waiting)]])


def absent(state: SchedulerState) -> SchedulerDecision:
    """A request that is not there comes first."""
    strangers = [entry._replace(request_id="stranger") for entry in state.running]
    return SchedulerDecision([strangers, *FCFS()(state).order])


def crowded(state: SchedulerState) -> SchedulerDecision:
    """All that wait before all that run, whether there is room or not."""
    return SchedulerDecision([state.waiting, state.waiting, state.running])


def idle(state: SchedulerState) -> SchedulerDecision:
    """Waits for a second request that does not come."""
    return FCFS()(state) if len(state.running) + len(state.waiting) > 1 else SchedulerDecision()


def shortest(state: SchedulerState) -> SchedulerDecision:
    """Short prompts first, whatever the others' age."""
    return FCFS()(replace(state, waiting=tuple(sorted(state.waiting, key=lambda entry: entry.num_prompt_tokens))))


def newest(state: SchedulerState) -> SchedulerDecision:
    return FCFS()(replace(state, waiting=state.waiting[::-1]))


def youngest(state: SchedulerState) -> SchedulerDecision:
    """Of those that run only the youngest goes on: the oldest of all never does, though all that come later end."""
    if len(state.running) < 2:
        return FCFS()(state)
    *others, last = state.running
    return SchedulerDecision([last], preempted=others)


def in_rounds(state: SchedulerState) -> SchedulerDecision:
    """Preempt every request that has computed something, in favour of those that wait."""
    computed = [entry for entry in state.running if entry.num_computed_tokens] if state.waiting else []
    return replace(FCFS()(state), preempted=computed)


def names_kept(state: SchedulerState) -> SchedulerDecision:
    keep: Any = [entry.request_id for entry in state.running]
    return replace(FCFS()(state), keep=keep)


class Moody:
    """Serves the youngest alone in every other step that it is asked."""

    def __init__(self) -> None:
        self.asked = itertools.count()

    def __call__(self, state: SchedulerState) -> SchedulerDecision:
        if state.running and next(self.asked) % 2:
            return SchedulerDecision(state.running[-1:])
        return FCFS()(state)


@pytest.mark.parametrize(
    ("policy", "law"),
    [
        (negative, "an order has only requests that run or wait, and turns of a number of tokens"),
        (absent, "an order has only requests that run or wait, and turns of a number of tokens"),
        (names_kept, "an order has only requests that run or wait, and turns of a number of tokens"),
        (idle, "some request advances where one can"),
        (in_rounds, "no preemption loop: between two of one sequence some request advances further"),
        (Moody(), "the same state gives the same order"),
        (shortest, "no request starves among short prompts"),
        (newest, "no request starves among requests of other tenants"),
        (youngest, "no request starves among long outputs"),
    ],
)  # fmt: skip
def test_the_law_that_a_policy_breaks_is_named(
    policy: Callable[[SchedulerState], SchedulerDecision], law: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    try_only(law, monkeypatch)
    report = check_policy(policy, examples=20)
    assert broken(report) == [law], str(report)
    assert "BROKEN" in str(report)


@pytest.mark.parametrize(
    "law", ["pages conserved: no request starts without free pages", "some request advances where one can"]
)
def test_no_order_starts_requests_without_room(law: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots, tokens and pages are counted by the scheduler."""
    try_only(law, monkeypatch)
    assert check_policy(crowded, examples=20).passed


@pytest.mark.parametrize("lost", [True, False])
def test_pages_that_are_lost_or_taken_are_noticed(lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    try_only(law := "pages conserved: no request starts without free pages", monkeypatch)
    release = PagePool.release
    if lost:
        monkeypatch.setattr(PagePool, "release", lambda pool, pages: release(pool, [*pages][1:]))
    else:
        monkeypatch.setattr(StepAllocation, "reserve", reserve_nothing)
    assert broken(check_policy(crowded, examples=40)) == [law]


def reserve_nothing(step: StepAllocation, lacking: list[Sequence]) -> None:
    step.lacking, step.reserved_pages = lacking, [0 for _ in step.kv_cache_manager.pools]


def test_a_policy_of_a_file_is_checked_by_its_path(tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from workbench.scheduler.policy import SchedulerDecision\n\n\n"
        "def numbers(state):\n"
        "    return SchedulerDecision([state.decodes, state.prefills, state.waiting, [1]])\n"
    )
    report = check_policy(f"{file}:numbers", examples=5)
    assert not report.passed and "is 1, must be a request" in str(report)


def test_a_policy_that_cannot_be_is_refused() -> None:
    with pytest.raises(WorkbenchError, match="policy: .*shortest_prompt.*did you mean 'shortest_prompt'"):
        check_policy("shortest_promt")
    with pytest.raises(WorkbenchError, match=r"not callable; it needs __call__\(self, state\)"):
        check_policy("os.path:sep")


def earliest(state: SchedulerState) -> SchedulerDecision:
    """The earliest deadline first, and those without one last."""
    return FCFS()(replace(state, waiting=tuple(sorted(state.waiting, key=lambda entry: entry.deadline))))


def predicted(state: SchedulerState) -> SchedulerDecision:
    """The shortest prediction first, where there is one: limits are none."""
    order = sorted(state.waiting, key=lambda entry: min(entry.predicted_tokens - entry.max_tokens, 0))
    return FCFS()(replace(state, waiting=tuple(order)))


def cached(state: SchedulerState) -> SchedulerDecision:
    order = sorted(state.waiting, key=lambda entry: -state.cached_tokens[entry.request_id])
    return FCFS()(replace(state, waiting=tuple(order)))


@pytest.mark.parametrize(
    ("policy", "others"),
    [
        (earliest, "requests with deadlines"),
        (predicted, "requests predicted to be short"),
        (cached, "requests with a cached prefix"),
    ],
)
def test_a_policy_may_give_up_a_law_by_name(
    policy: Callable[[SchedulerState], SchedulerDecision], others: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    law = f"no request starves among {others}"
    with pytest.MonkeyPatch.context() as patch:
        try_only(law, patch)
        assert broken(check_policy(policy, examples=20)) == [law]
    monkeypatch.setattr(policy, "gives_up", {law}, raising=False)
    report = check_policy(policy, examples=20)
    (given_up,) = (each for each in report.laws if each.law == law)
    assert report.passed and not given_up.tried and "given up" in str(report), str(report)
    monkeypatch.setattr(policy, "gives_up", {"no request starves among request with deadlines"})
    with pytest.raises(WorkbenchError, match=".* is not a law.*did you mean '.*among requests with deadlines'"):
        check_policy(policy)
