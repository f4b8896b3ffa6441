"""Laws of a scheduling policy, on integer schedules run by the real scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from workbench.engine.lawful import lawful
from workbench.engine.policy import Counts, Entry, Policy, State, Wishes
from workbench.request import Request, Sequence
from workbench.testing.policy_scenes import Coming, Played, PolicyScene, steps
from workbench.testing.report import Broken

PATIENCE = 200  # steps that a request may wait, where the policy has no limit
AHEAD = 250  # further steps for requests ahead: all work under way in a starvation scenario


def _pure(policy: Policy, scene: PolicyScene) -> None:
    for played, plan in steps(scene, policy):
        if played.asked is None:
            continue
        state, wishes = played.asked
        again = policy(replace(state))
        again = tuple(again.tokens), tuple(again.set_back)
        if again != (wishes.tokens, wishes.set_back):
            raise Broken(f"step {plan.step}: asked twice about one state it wishes {wishes.tokens}, then {again[0]}")


def _within(policy: Policy, scene: PolicyScene) -> None:
    for played, plan in steps(scene, policy):
        if played.asked is None:
            continue
        state, wishes = played.asked
        here = {e.id: Sequence.of(Request(e.id, ()), e.order) for e in (*state.running, *state.waiting)}
        found = lawful(wishes, state, here, "it")
        wrong = [words.removeprefix("policy it: ") for _, words in found.faults]
        wrong += [stray.reason.removeprefix("policy it: ") for stray in found.strays]
        if wrong:
            raise Broken(f"step {plan.step}: it {wrong[0]}, on {scene}")


def _pages(policy: Policy, scene: PolicyScene) -> None:
    """Check that no request starts without free pages, and that every page is free in the end."""
    scheduler = None
    for played, plan in steps(scene, policy):
        scheduler = played.scheduler
        for pool in scheduler.pools:
            if pool.free + pool.used + len(pool.idle) != pool.pages:
                raise Broken(f"step {plan.step}: {pool.free} free + {pool.used} used pages are not {pool.pages}")
        if played.asked is None:
            continue
        state, wishes = played.asked
        begins, room = _begins(state, wishes), _room(state, wishes)
        needed = tuple(sum(column) for column in zip(*(state.needs[entry.id] for entry in begins), strict=True))
        if any(count > max(0, free) for count, free in zip(needed, room, strict=False)):
            names = ", ".join(entry.id for entry in begins)
            raise Broken(f"step {plan.step}: lets {names} begin, who need {needed} pages of {room}, on {scene}")
    if scheduler is not None and scheduler.pages_used:
        raise Broken(f"{scheduler.pages_used} pages are still held when everything has ended, on {scene}")


def _fitting(policy: Policy, scene: PolicyScene) -> None:
    """Check that no request starts where none fits, and that some request advances where one can."""
    for played, plan in steps(scene, policy):
        if played.asked is None:
            continue
        state, wishes = played.asked
        room, begins = _room(state, wishes), _begins(state, wishes)
        fitting = [e for e in state.waiting if all(n <= f for n, f in zip(state.needs[e.id], room, strict=True))]
        if not fitting and begins:
            name, needs = begins[0].id, state.needs[begins[0].id]
            raise Broken(f"step {plan.step}: lets {name} begin, who needs {needs} pages of {room}, on {scene}")
        if not begins and not any(tokens for _, tokens in wishes.tokens):
            raise Broken(f"step {plan.step}: plans nothing for {len(state.running)} that run, on {scene}")


def _no_loop(policy: Policy, scene: PolicyScene) -> None:
    """Check that between two preemptions of one sequence some request advances further than ever before."""
    most: dict[str, int] = {}  # most tokens computed of each request
    before: dict[str, tuple[int, int]] = {}  # at its last preemption: the step, and the sum of `most`
    for _, plan in steps(scene, policy):
        for decision in plan.decisions:
            if decision.action == "set_back":
                name, now = decision.request_id, sum(most.values())
                if name in before and before[name][1] == now:
                    between = f"after step {before[name][0]} and again after step {plan.step}"
                    raise Broken(f"{name} is set back {between}, and nobody got further in between, on {scene}")
                before[name] = plan.step, now
        for span in plan.spans:
            most[span.sequence.request_id] = max(most.get(span.sequence.request_id, 0), span.end)


RIVALS: dict[str, tuple[Coming, Coming]] = {  # the waiting request, and those that arrive without end
    "short prompts": (Coming(0, 14, 3, 1), Coming(0, 1, 2, 1)),
    "long prompts": (Coming(0, 2, 3, 1), Coming(0, 20, 2, 1)),
    "urgent requests": (Coming(0, 6, 3, 2), Coming(0, 6, 3, 0)),
    "requests of other tenants": (Coming(0, 6, 3, 1), Coming(0, 6, 3, 1)),
    "prompts without outputs": (Coming(0, 5, 12, 1), Coming(0, 9, 1, 1)),
    "long outputs": (Coming(0, 8, 3, 1), Coming(0, 3, 24, 1)),
}


def nobody_starves(policy: Policy, rivals: str, scene: PolicyScene) -> None:
    """Check that each waiting or running request ends within the starvation limit and the work ahead of it.

    Competing requests arrive without end meanwhile.
    """
    victim, rival = RIVALS[rivals]
    played, count = Played.of(scene, policy), 0
    while count < scene.seats:  # they run when the victim arrives
        count += played.submit(rival, f"rival {count}") is not None
        if len(played.open) <= count - 1:
            return  # it does not fit alone
    played.step()
    played.submit(victim, "victim")
    awaited = list(played.open)
    patience = getattr(policy, "patience", None) or PATIENCE
    for _ in range(patience + AHEAD):
        while sum(not sequence.computed for sequence in played.open) < 5:
            tenant = count if rivals == "requests of other tenants" else 0
            played.submit(replace(rival, tenant=tenant), f"rival {count}")
            count += 1
        played.step()
        awaited = [sequence for sequence in awaited if sequence.finish_reason is None]
        if not awaited:
            return
    done = f"{awaited[0].computed} of its tokens computed, {awaited[0].set_backs} set-backs"
    raise Broken(f"among {rivals} without end, one has not ended after {patience + AHEAD} steps ({done}), on {scene}")


def _begins(state: State, wishes: Wishes) -> list[Entry]:
    """Return the waiting requests that the decision starts."""
    waiting = {entry.id: entry for entry in state.waiting}
    return [waiting[name] for name, tokens in wishes.tokens if tokens and name in waiting]


def _room(state: State, wishes: Wishes) -> Counts:
    """Return the free pages, with those of preempted requests."""
    given = [state.gives[name] for name in wishes.set_back if name in state.gives]
    return tuple(sum(column) for column in zip(state.free, *given, strict=True))


LAWS: dict[str, Callable[[Policy, PolicyScene], None]] = {
    "a step's tokens are kept to, nobody is named twice, and only who is there": _within,
    "pages conserved: nobody begins in pages that are not there": _pages,
    "no plan when nothing fits, and one whenever somebody can get on": _fitting,
    "no set-back loop: between two of one sequence somebody gets further": _no_loop,
    "the same state gives the same plan": _pure,
}
STARVING = "nobody starves among {}"
