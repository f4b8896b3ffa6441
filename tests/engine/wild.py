"""A policy that decides anything: whatever it decides, pages and requests must come to no harm."""

from __future__ import annotations

import math
import random
from typing import Any

from workbench.scheduler.policies import FCFS
from workbench.scheduler.policy import RequestView, SchedulerDecision, SchedulerState


class Wild:
    """The same decision for the same step, in any order and of any length; now and then one that breaks a law."""

    kind = "wild"

    def __init__(self, seed: int):
        self.seed = seed

    def __call__(self, state: SchedulerState) -> SchedulerDecision:
        draw = random.Random(hash((self.seed, state.step, len(state.running), len(state.waiting))))
        backs: list[Any] = [entry.request_id for entry in state.running if draw.random() < 0.05]
        every = draw.sample(sorted([*state.running, *state.waiting]), len(state.running) + len(state.waiting))
        left, scheduled = state.max_num_batched_tokens, []
        for entry in every:
            tokens = draw.choice([0, 1, entry.num_new_tokens, draw.randrange(entry.num_new_tokens + 1)])
            if entry.request_id not in backs and tokens <= left:
                scheduled.append((entry.request_id, tokens))
                left -= tokens
        going = [entry for entry in state.running if entry.num_new_tokens and entry.request_id not in backs]
        if not any(_progresses(state, entry, dict(scheduled).get(entry.request_id, 0)) for entry in going):
            return FCFS()(state)  # some request must make progress
        if draw.random() < 0.03:
            scheduled.insert(draw.randrange(len(scheduled) + 1), _wrong(draw, every))
            backs += draw.choice([[], [[backs]], ["unknown"], [None]])
        return SchedulerDecision(scheduled, backs)


def _progresses(state: SchedulerState, entry: RequestView, tokens: int) -> bool:
    """Where prefills are whole, a part of one is none."""
    least = min(entry.num_new_tokens, state.max_num_batched_tokens) if state.whole_prefills else 1
    return tokens >= least


def _wrong(draw: random.Random, every: list[RequestView]) -> tuple:
    name = draw.choice(every).request_id
    tokens = [(name, -1), (name, 1000), (name, 1), (name, 0.5), (name, "1"), (name, math.inf), (name, [1])]
    return draw.choice([*tokens, ("unknown", 1), (None,), ([name], 1), ({}, "1"), ((name, []), 0)])
