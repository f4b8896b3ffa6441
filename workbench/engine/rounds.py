"""Time steps of several backends beside each other, on a shared machine.

Contention only ever makes a step slower, and not every round. So backends take turns, rounds go on while the quick ones
disagree, and the quickest rounds are compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from compiled_kernels import Lane

LEAST_ROUNDS, MOST_ROUNDS = 7, 100
AGREEING = 3  # a figure is trusted once this many rounds agree
WITHIN = 1.1  # times the quickest
CLEARLY = 0.8  # a backend is clearly faster below this fraction of another's time
BUDGET_SECONDS = 1.5  # per backend


@dataclass(frozen=True)
class Times:
    """The quickest of `rounds` by backend. `is_stable`: several rounds of every backend agree with it."""

    seconds: Mapping[Lane, float]
    rounds: int
    quiet: bool


def timed(
    steps: Mapping[Lane, Callable[[], object]],
    budget_seconds: float = BUDGET_SECONDS,
    clock: Callable[[], float] | None = None,
) -> Times:
    """Run `steps` in turns until the quickest rounds of each agree or the budget is spent; each runs once before,
    untimed.

    Args:
        steps: functions to time, by backend.
        budget_seconds: time limit per backend.
        clock: returns seconds.
    """
    clock = clock or time.perf_counter
    order, samples = list(steps), {lane: [] for lane in steps}
    for step in steps.values():
        step()
    began, rounds = clock(), 0
    while rounds < MOST_ROUNDS and order:
        first = rounds % len(order)
        for lane in order[first:] + order[:first]:
            start = clock()
            steps[lane]()
            samples[lane].append(clock() - start)
        rounds += 1
        spent = clock() - began >= budget_seconds * len(order)
        if (rounds >= LEAST_ROUNDS and all(map(_agree, samples.values()))) or (spent and rounds >= AGREEING):
            break
    quiet = all(map(_agree, samples.values()))
    return Times({lane: min(found) for lane, found in samples.items()}, rounds, quiet)


def _agree(samples: list[float]) -> bool:
    quick = sorted(samples)[:AGREEING]
    return len(quick) == AGREEING and quick[-1] <= WITHIN * quick[0]
