"""Time steps of several backends beside each other, on a shared machine.

Contention only ever makes a step slower, and not every round. So backends take turns, rounds go on while the quick ones
disagree, and the quickest rounds are compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from compiled_kernels import Backend

MIN_ROUNDS, MAX_ROUNDS = 7, 100
MIN_AGREEING_ROUNDS = 3  # a figure is trusted once this many rounds agree
AGREEMENT_RATIO = 1.1  # times the quickest
CLEARLY_FASTER_RATIO = 0.8  # a backend is clearly faster below this fraction of another's time
BUDGET_SECONDS = 1.5  # per backend


@dataclass(frozen=True)
class RoundTimes:
    """The quickest of `rounds` by backend. `is_stable`: several rounds of every backend agree with it."""

    seconds: Mapping[Backend, float]
    rounds: int
    is_stable: bool


def time_in_rounds(
    steps: Mapping[Backend, Callable[[], object]],
    budget_seconds: float = BUDGET_SECONDS,
    clock: Callable[[], float] | None = None,
) -> RoundTimes:
    """Run `steps` in turns until the quickest rounds of each agree or the budget is spent; each runs once before,
    untimed.

    Args:
        steps: functions to time, by backend.
        budget_seconds: time limit per backend.
        clock: returns seconds.
    """
    clock = clock or time.perf_counter
    order, samples = list(steps), {backend: [] for backend in steps}
    for step in steps.values():
        step()
    began, rounds = clock(), 0
    while rounds < MAX_ROUNDS and order:
        first = rounds % len(order)
        for backend in order[first:] + order[:first]:
            start = clock()
            steps[backend]()
            samples[backend].append(clock() - start)
        rounds += 1
        spent = clock() - began >= budget_seconds * len(order)
        if (rounds >= MIN_ROUNDS and all(map(_agree, samples.values()))) or (spent and rounds >= MIN_AGREEING_ROUNDS):
            break
    quiet = all(map(_agree, samples.values()))
    return RoundTimes({backend: min(found) for backend, found in samples.items()}, rounds, quiet)


def _agree(samples: list[float]) -> bool:
    quick = sorted(samples)[:MIN_AGREEING_ROUNDS]
    return len(quick) == MIN_AGREEING_ROUNDS and quick[-1] <= AGREEMENT_RATIO * quick[0]
