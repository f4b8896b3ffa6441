"""The kit for scheduling policies: what it says of ours, and of ones that break a law each."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from workbench.engine.policies import FCFS
from workbench.engine.policy import State, Wishes
from workbench.engine.schedule import BUILT_IN
from workbench.errors import WorkbenchError
from workbench.testing import check_policy
from workbench.testing.report import Report


def broken(report: Report) -> list[str]:
    return [law.law for law in report.laws if not law.ok]


@pytest.mark.parametrize("kind", ["continuous", "static"])
@pytest.mark.parametrize("name", BUILT_IN)
def test_our_policies_keep_every_law(name: str, kind: str) -> None:
    patience = {} if name == "fcfs" else {"patience": 60}
    report = check_policy({"kind": name, **patience}, examples=15, kind=kind)
    assert report.passed and len(report.laws) == 11, str(report)


def greedy(state: State) -> Wishes:
    """More tokens than a step has."""
    wishes = FCFS()(state)
    return replace(wishes, tokens=[(name, tokens and state.budget) for name, tokens in wishes.tokens])


def crowded(state: State) -> Wishes:
    """Looks whether each fits, and never whether all do."""
    wishes, left = list(FCFS()(replace(state, waiting=())).tokens), state.budget
    left -= sum(tokens for _, tokens in wishes)
    for entry in state.waiting[: max(0, state.places)]:
        if left and min(state.free) >= 0 and state.fits(entry):
            wishes.append((entry.id, 1))
            left -= 1
    return Wishes(wishes)


def blind(state: State) -> Wishes:
    """Lets the first begin whether there are pages or not."""
    wishes = [wish for wish in FCFS()(replace(state, waiting=())).tokens]
    if state.waiting and state.places > 0 and sum(tokens for _, tokens in wishes) < state.budget:
        wishes.append((state.waiting[0].id, 1))
    return Wishes(wishes)


def idle(state: State) -> Wishes:
    """Waits for company that does not come."""
    return FCFS()(state) if len(state.running) + len(state.waiting) > 1 else Wishes()


def shortest(state: State) -> Wishes:
    """Short prompts first, whatever the others' age."""
    return FCFS()(replace(state, waiting=tuple(sorted(state.waiting, key=lambda entry: entry.prompt))))


def newest(state: State) -> Wishes:
    return FCFS()(replace(state, waiting=state.waiting[::-1]))


def youngest(state: State) -> Wishes:
    """Of those that run only the youngest goes on: the oldest of all never does, though all that come later end."""
    if len(state.running) < 2:
        return FCFS()(state)
    *others, last = state.running
    return Wishes([(last.id, min(last.todo, state.budget))], set_back=[entry.id for entry in others])


def in_rounds(state: State) -> Wishes:
    """Who has computed something makes room for who waits."""
    backs = [entry.id for entry in state.running if entry.computed] if state.waiting else []
    running = tuple(entry for entry in state.running if entry.id not in backs)
    return replace(FCFS()(replace(state, running=running)), set_back=backs)


class Moody:
    """Decodes in every other step that it is asked."""

    def __init__(self) -> None:
        self.asked = itertools.count()

    def __call__(self, state: State) -> Wishes:
        wishes = FCFS()(state)
        going = [name for name, tokens in wishes.tokens if tokens]
        return replace(wishes, tokens=[(going[-1], 1)]) if going and next(self.asked) % 2 else wishes


@pytest.mark.parametrize(
    ("policy", "law"),
    [
        (greedy, "a step's tokens are kept to, nobody is named twice, and only who is there"),
        (crowded, "pages conserved: nobody begins in pages that are not there"),
        (blind, "no plan when nothing fits, and one whenever somebody can get on"),
        (idle, "no plan when nothing fits, and one whenever somebody can get on"),
        (in_rounds, "no set-back loop: between two of one sequence somebody gets further"),
        (Moody(), "the same state gives the same plan"),
        (shortest, "nobody starves among short prompts"),
        (newest, "nobody starves among requests of other tenants"),
        (youngest, "nobody starves among long outputs"),
    ],
)  # fmt: skip
def test_a_policy_that_breaks_a_law_is_told_which(policy: Callable[[State], Wishes], law: str) -> None:
    report = check_policy(policy, examples=20)
    assert law in broken(report), str(report)
    assert "BROKEN" in str(report)


def test_a_policy_of_a_file_is_checked_by_its_path(tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from workbench.engine.policies import FCFS\nfrom workbench.engine.policy import Wishes\n\n\n"
        "def twice(state):\n    return Wishes([*FCFS()(state).tokens, *((entry.id, 0) for entry in state.running)])\n"
    )
    report = check_policy(f"{file}:twice", examples=5)
    assert not report.passed and "twice in one step" in str(report)


def test_a_policy_that_cannot_be_is_refused() -> None:
    with pytest.raises(WorkbenchError, match="policy: .*shortest_prompt.*did you mean 'shortest_prompt'"):
        check_policy("shortest_promt")
    with pytest.raises(WorkbenchError, match=r"not callable; it needs __call__\(self, state\)"):
        check_policy("os.path:sep")
