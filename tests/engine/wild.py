"""A policy that wishes anything: whatever it says, pages and requests must come to no harm."""

from __future__ import annotations

import random

from workbench.engine.policies import FCFS
from workbench.engine.policy import Entry, State, Wishes


class Wild:
    """The same wishes for the same step, in any order and of any length; now and then one that breaks a law."""

    kind = "wild"

    def __init__(self, seed: int):
        self.seed = seed

    def __call__(self, state: State) -> Wishes:
        draw = random.Random(hash((self.seed, state.step, len(state.running), len(state.waiting))))
        backs = [entry.id for entry in state.running if draw.random() < 0.05]
        every = draw.sample(sorted(state.running + state.waiting), len(state.running) + len(state.waiting))
        left, wishes = state.budget, []
        for entry in every:
            tokens = draw.choice([0, 1, entry.todo, draw.randrange(entry.todo + 1)])
            if entry.id not in backs and tokens <= left:
                wishes.append((entry.id, tokens))
                left -= tokens
        going = [entry for entry in state.running if entry.todo and entry.id not in backs]
        if not any(dict(wishes).get(entry.id) for entry in going):
            return FCFS()(state)  # with somebody it must go on
        if draw.random() < 0.03:
            wishes.append(_wrong(draw, every))
        return Wishes(wishes, backs)


def _wrong(draw: random.Random, every: list[Entry]) -> tuple:
    name = draw.choice(every).id
    return draw.choice([("nobody", 1), (name, -1), (name, 1000), (name, 1), (name, 0.5), (name, "1"), (None,)])
