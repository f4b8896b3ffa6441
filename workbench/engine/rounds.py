"""Time the steps of several lanes beside each other, on a machine that others use too.

Other processes only ever make a step slower, and not every round: so lanes take turns, rounds go on while the quick
ones disagree, and what is compared is the quickest round of each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from compiled_kernels import Lane

LEAST_ROUNDS, MOST_ROUNDS = 7, 100
AGREEING = 3  # a figure is trusted once this many rounds are
WITHIN = 1.1  # times the quickest
CLEARLY = 0.8  # a lane is quicker beyond doubt that takes less than this share of the time of another
BUDGET_SECONDS = 1.5  # for each lane: then what was found has to do


@dataclass(frozen=True)
class Times:
    """`seconds` of the quickest of `rounds` by lane. `quiet`: of every lane several rounds were as quick, so that the
    figure is the lane's and not the machine's."""

    seconds: Mapping[Lane, float]
    rounds: int
    quiet: bool


def timed(
    steps: Mapping[Lane, Callable[[], object]],
    budget_seconds: float = BUDGET_SECONDS,
    clock: Callable[[], float] | None = None,
) -> Times:
    """Run `steps` in turn, each round beginning with another, until the quickest rounds of each agree or the budget is
    spent. Each step is run once before, untimed."""
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
