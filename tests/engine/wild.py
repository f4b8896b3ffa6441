"""A policy that decides anything: whatever it decides, pages and requests must come to no harm."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

from workbench.scheduler.policies import FCFS
from workbench.scheduler.policy import RequestView, SchedulerDecision, SchedulerState, Turn


class Wild:
    """The same decision for the same step: any order of any length, turns of any tokens, pages kept in any order; now
    and then an item that is none, or an error in the middle of the order."""

    kind = "wild"

    def __init__(self, seed: int):
        self.seed = seed

    def __call__(self, state: SchedulerState) -> SchedulerDecision:
        draw = random.Random(hash((self.seed, state.step, len(state.running), len(state.waiting))))
        preempted: list[Any] = [entry for entry in state.running if draw.random() < 0.05]
        if not any(entry.num_new_tokens and entry not in preempted for entry in state.running):
            return FCFS()(state)  # some request must make progress
        requests = sorted([*state.running, *state.waiting])
        order: list[Any] = []
        for entry in draw.choices(requests, k=len(requests)):
            order.append(draw.choice([entry, entry, Turn(entry, draw.randrange(entry.num_new_tokens + 2))]))
        if draw.random() < 0.3:
            order.insert(draw.randrange(len(order)), draw.choice([state.decodes, state.prefills, state.running]))
        wrong = draw.random() < 0.03
        if wrong:
            order.insert(draw.randrange(len(order) + 1), _wrong(draw, requests))
            preempted += draw.choice([[], [[preempted]], ["unknown"], [None], [draw.choice(requests)]])
        if draw.random() < 0.05:
            return SchedulerDecision(_raising(order[: draw.randrange(len(order) + 1)]), preempted=preempted)
        keep: Any = draw.choice(
            [None, draw.sample(requests, draw.randrange(len(requests) + 1)), [None] if wrong else ()]
        )
        return SchedulerDecision(order, keep, preempted)


def _raising(order: list[Any]) -> Iterator[Any]:
    yield from order
    raise RuntimeError("midway")


def _wrong(draw: random.Random, requests: list[RequestView]) -> Any:
    entry = draw.choice(requests)
    no_request: Any = None
    tokens: list[Any] = [-1, 0.5, True, "1", math.inf, [1], None]
    wrong = [Turn(entry, each) for each in tokens]
    return draw.choice([*wrong, entry._replace(request_id="unknown"), None, "r0", 3, {}, [[entry]],
                        entry._replace(request_id=[]), Turn(no_request, 1), (entry.request_id, 1)])  # fmt: skip
