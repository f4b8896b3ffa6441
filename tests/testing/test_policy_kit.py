"""The kit for scheduling policies: what it says of ours, and of ones that break a law each."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from workbench.errors import WorkbenchError
from workbench.scheduler.policies import BUILT_IN_POLICIES, FCFS
from workbench.scheduler.policy import SchedulerDecision, SchedulerState
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


def greedy(state: SchedulerState) -> SchedulerDecision:
    """More tokens than a step has."""
    decision = FCFS()(state)
    return replace(
        decision,
        num_scheduled_tokens=[
            (name, tokens and state.max_num_batched_tokens) for name, tokens in decision.num_scheduled_tokens
        ],
    )


def crowded(state: SchedulerState) -> SchedulerDecision:
    """Looks whether each fits, and never whether all do."""
    scheduled, left = list(FCFS()(replace(state, waiting=())).num_scheduled_tokens), state.max_num_batched_tokens
    left -= sum(tokens for _, tokens in scheduled)
    for entry in state.waiting[: max(0, state.free_slots)]:
        if left and min(state.free_pages) >= 0 and state.fits(entry):
            scheduled.append((entry.request_id, 1))
            left -= 1
    return SchedulerDecision(scheduled)


def blind(state: SchedulerState) -> SchedulerDecision:
    """Lets the first begin whether there are pages or not."""
    scheduled = [wish for wish in FCFS()(replace(state, waiting=())).num_scheduled_tokens]
    if state.waiting and state.free_slots > 0 and sum(tokens for _, tokens in scheduled) < state.max_num_batched_tokens:
        scheduled.append((state.waiting[0].request_id, 1))
    return SchedulerDecision(scheduled)


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
    return SchedulerDecision(
        [(last.request_id, min(last.num_new_tokens, state.max_num_batched_tokens))],
        preempted=[entry.request_id for entry in others],
    )


def in_rounds(state: SchedulerState) -> SchedulerDecision:
    """Preempt every request that has computed something, in favour of those that wait."""
    backs = [entry.request_id for entry in state.running if entry.num_computed_tokens] if state.waiting else []
    running = tuple(entry for entry in state.running if entry.request_id not in backs)
    return replace(FCFS()(replace(state, running=running)), preempted=backs)


class Moody:
    """Decodes in every other step that it is asked."""

    def __init__(self) -> None:
        self.asked = itertools.count()

    def __call__(self, state: SchedulerState) -> SchedulerDecision:
        decision = FCFS()(state)
        going = [name for name, tokens in decision.num_scheduled_tokens if tokens]
        return replace(decision, num_scheduled_tokens=[(going[-1], 1)]) if going and next(self.asked) % 2 else decision


@pytest.mark.parametrize(
    ("policy", "law"),
    [
        (greedy, "a step keeps its token budget, names no request twice, and only present ones"),
        (crowded, "pages conserved: no request starts without free pages"),
        (blind, "no request starts where none fits, and some request advances where one can"),
        (idle, "no request starts where none fits, and some request advances where one can"),
        (in_rounds, "no preemption loop: between two of one sequence some request advances further"),
        (Moody(), "the same state gives the same plan"),
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


def test_a_policy_of_a_file_is_checked_by_its_path(tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from workbench.scheduler.policies import FCFS\nfrom workbench.scheduler.policy import SchedulerDecision\n\n\n"
        "def twice(state):\n"
        "    again = [(entry.request_id, 0) for entry in state.running]\n"
        "    return SchedulerDecision([*FCFS()(state).num_scheduled_tokens, *again])\n"
    )
    report = check_policy(f"{file}:twice", examples=5)
    assert not report.passed and "twice in one step" in str(report)


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
    with pytest.raises(WorkbenchError, match="gives_up names no law: .*did you mean '.*among requests with deadlines'"):
        check_policy(policy)
