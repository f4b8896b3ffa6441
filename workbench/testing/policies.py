"""Check a user-defined scheduling policy against the laws of the built-in policies, on small schedules run by the real
scheduler.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from workbench.errors import WorkbenchError, nearest
from workbench.scheduler.policies import parse_policy
from workbench.scheduler.policy import RequestView, SchedulingPolicy
from workbench.scheduler.validate import policy_name
from workbench.testing.law import ConformityReport, Law, LawBroken, check_law
from workbench.testing.policy_scenarios import (
    ArrivingRequest,
    PolicyScenario,
    ScheduleHarness,
    play_scenario,
    policy_scenarios,
    requests_of,
    with_lists,
)

STARVATION_LIMIT = 200  # steps that a request may wait if the policy has no limit
STEPS_AHEAD = 250  # further steps for requests ahead: all work in progress in a starvation scenario
COMPETING_REQUESTS: dict[
    str, tuple[ArrivingRequest, ArrivingRequest]
] = {  # the waiting request, and the competitors that keep arriving
    "short prompts": (ArrivingRequest(0, 14, 3, 1), ArrivingRequest(0, 1, 2, 1)),
    "long prompts": (ArrivingRequest(0, 2, 3, 1), ArrivingRequest(0, 20, 2, 1)),
    "urgent requests": (ArrivingRequest(0, 6, 3, 2), ArrivingRequest(0, 6, 3, 0)),
    "requests of other tenants": (ArrivingRequest(0, 6, 3, 1), ArrivingRequest(0, 6, 3, 1)),
    "prompts without outputs": (ArrivingRequest(0, 5, 12, 1), ArrivingRequest(0, 9, 1, 1)),
    "long outputs": (ArrivingRequest(0, 8, 3, 1), ArrivingRequest(0, 3, 24, 1)),
    "requests with deadlines": (ArrivingRequest(0, 6, 3, 1), ArrivingRequest(0, 6, 3, 1, deadline=1.0)),
    "requests predicted to be short": (
        ArrivingRequest(0, 6, 3, 1, predicted_tokens=30), ArrivingRequest(0, 6, 3, 1, predicted_tokens=1),
    ),
    "requests with a cached prefix": (ArrivingRequest(0, 10, 3, 1, shares_prefix=False), ArrivingRequest(0, 10, 3, 1)),
}  # fmt: skip
CACHED = "requests with a cached prefix"
STARVATION_LAW = "no request starves among {}"
STARTED = re.compile(r"admitted: \d+ pages taken")
SHORT_OF_PAGES = re.compile(r"needs \d+ more pages, .*; the (youngest|last in order) is preempted")
# One slot or several, few or many tokens per step, pages for all requests or hardly for one.
_STARVATION_SCENARIOS = st.builds(
    PolicyScenario, st.just(()), st.sampled_from(["full", "full and window"]), st.sampled_from([10, 40]),
    st.sampled_from([1, 2, 4]), st.sampled_from([4, 24]),
)  # fmt: skip


def _pure(policy: SchedulingPolicy, scenario: PolicyScenario) -> None:
    for played, plan in play_scenario(scenario, policy):
        if played.last_decision is None:
            continue
        state, decision = played.last_decision
        again = with_lists(policy(replace(state)), state)
        if again != decision:
            first, second = ([each.request_id for each in requests_of(made.order)] for made in (decision, again))
            raise LawBroken(f"step {plan.step}: called twice with one state it decides {first}, then {second}")


def _valid(policy: SchedulingPolicy, scenario: PolicyScenario) -> None:
    for played, plan in play_scenario(scenario, policy):
        keep = () if played.last_decision is None else played.last_decision[1].keep or ()
        wrong = [f"keep has {each!r}, must have requests" for each in keep if not isinstance(each, RequestView)]
        wrong += [error for _, error in plan.errors]
        wrong += [each.reason for each in plan.decisions if each.action == "refused_decision"]
        if wrong:
            raise LawBroken(f"step {plan.step}: {wrong[0]}, on {scenario}")


def _pages(policy: SchedulingPolicy, scenario: PolicyScenario) -> None:
    """Check that pages are conserved in every step, that no running request loses pages to a request that starts, and
    that all pages are free at the end.
    """
    scheduler = None
    for played, plan in play_scenario(scenario, policy):
        scheduler = played.scheduler
        for pool in scheduler.pools:
            if pool.num_free + pool.num_used + len(pool.evictable) != pool.num_pages:
                raise LawBroken(
                    f"step {plan.step}: {pool.num_free} free + {pool.num_used} used pages are not {pool.num_pages}"
                )
        reasons = [each.reason for each in plan.decisions]
        if any(map(STARTED.match, reasons)) and any(map(SHORT_OF_PAGES.search, reasons)):
            raise LawBroken(
                f"step {plan.step}: starts a request without free pages ({'; '.join(reasons)}), on {scenario}"
            )
    if scheduler is not None and scheduler.pages_in_use:
        raise LawBroken(f"{scheduler.pages_in_use} pages are still held when everything has ended, on {scenario}")


def _progress(policy: SchedulingPolicy, scenario: PolicyScenario) -> None:
    """Check that some request advances if one can: `play_scenario` raises if none does."""
    for _ in play_scenario(scenario, policy):
        pass


def _no_loop(policy: SchedulingPolicy, scenario: PolicyScenario) -> None:
    """Check that between two preemptions of one sequence some request advances further than ever before."""
    most: dict[str, int] = {}  # maximum computed tokens of each request
    before: dict[str, tuple[int, int]] = {}  # at its last preemption: the step, and the sum of `most`
    for _, plan in play_scenario(scenario, policy):
        for decision in plan.decisions:
            if decision.action == "preempted":
                name, now = decision.request_id, sum(most.values())
                if name in before and before[name][1] == now:
                    between = f"after step {before[name][0]} and again after step {plan.step}"
                    raise LawBroken(f"{name} is preempted {between}, and no request advanced in between, on {scenario}")
                before[name] = plan.step, now
        for span in plan.spans:
            most[span.sequence.request_id] = max(most.get(span.sequence.request_id, 0), span.end)


def check_no_starvation(policy: SchedulingPolicy, competing: str, scenario: PolicyScenario) -> None:
    """Check that each waiting or running request ends within the starvation limit plus the time for work ahead of it.

    Competing requests keep arriving during the check.
    """
    victim, rival = COMPETING_REQUESTS[competing]
    scenario = replace(scenario, prefix=competing == CACHED)
    played, count = ScheduleHarness.from_scenario(scenario, policy), 0
    while count < scenario.max_num_seqs:  # they run when the victim arrives
        count += played.submit(rival, f"rival {count}") is not None
        if len(played.unfinished) <= count - 1:
            return  # the request does not fit even alone
    played.step()
    played.submit(victim, "victim")
    awaited = list(played.unfinished)
    starvation_limit = getattr(policy, "starvation_limit", None) or STARVATION_LIMIT
    for _ in range(starvation_limit + STEPS_AHEAD):
        while sum(not sequence.num_computed_tokens for sequence in played.unfinished) < 5:
            tenant = count if competing == "requests of other tenants" else 0
            played.submit(replace(rival, tenant=tenant), f"rival {count}")
            count += 1
        played.step()
        awaited = [sequence for sequence in awaited if sequence.finish_reason is None]
        if not awaited:
            return
    done = f"{awaited[0].num_computed_tokens} of its tokens computed, {awaited[0].num_preemptions} preemptions"
    raise LawBroken(
        f"among {competing} without end, one has not ended after {starvation_limit + STEPS_AHEAD} steps ({done}), "
        f"on {scenario}"
    )


LAWS: dict[str, Callable[[SchedulingPolicy, PolicyScenario], None]] = {
    "an order has only requests that run or wait, and turns of a number of tokens": _valid,
    "pages conserved: no request starts without free pages": _pages,
    "some request advances where one can": _progress,
    "no preemption loop: between two of one sequence some request advances further": _no_loop,
    "the same state gives the same order": _pure,
}


def check_policy(policy: Any, examples: int = 40, kind: Any = "continuous") -> ConformityReport:
    """Try `policy` on small schedules, and report for each law whether it holds.

    Args:
        policy: a function from `SchedulerState` to `SchedulerDecision`, or a value of `schedule.policy`: a name,
            settings, an import path. Its `starvation_limit`, in steps, limits waiting (default 200). Laws in its
            `gives_up` are marked and not tried.
        examples: number of schedules tried for each law, the same in every call.
        kind: kind of the schedule, `continuous` or `static`.

    Raises:
        WorkbenchError: if the policy cannot be found or built, or its `gives_up` names an unknown law.
    """
    made = parse_policy(policy, kind)
    given_up, laws = frozenset(getattr(made, "gives_up", ())), []
    starving = {STARVATION_LAW.format(rivals): rivals for rivals in COMPETING_REQUESTS}
    if unknown := sorted(given_up - {*LAWS, *starving}):
        known = "; ".join((*LAWS, *starving))
        hint = nearest(unknown[0], (*LAWS, *starving))
        raise WorkbenchError(f"policy {policy_name(made)}: gives_up: {unknown[0]!r} is not a law{hint}; laws: {known}")
    for law in (*LAWS, *starving):
        if law in given_up:
            laws.append(Law(law, True, "given up", tried=False))
        elif law in LAWS:
            laws.append(check_law(law, functools.partial(LAWS[law], made), examples, policy_scenarios()))
        else:
            check = functools.partial(check_no_starvation, made, starving[law])
            laws.append(check_law(law, check, max(2, examples // 10), _STARVATION_SCENARIOS))
    return ConformityReport(f"policy {policy_name(made)}", tuple(laws))
