"""Time functions in interleaved rounds, so that contention and drift affect all of them alike.

Contention only makes a step slower, and not in every round. To decide between two times (`time_in_rounds`), rounds
continue until the fastest ones agree, and the fastest rounds are compared.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from compiled_kernels.backends import Backend

T = TypeVar("T")
MIN_ROUNDS, MAX_ROUNDS = 7, 100
MIN_AGREEING_ROUNDS = 3  # rounds that must agree before a time is trusted
AGREEMENT_RATIO = 1.1  # times the quickest
BUDGET_SECONDS = 1.5  # per backend


def rotations(items: Iterable[T]) -> Iterator[list[T]]:
    """Yield the list of all items again and again; each time it begins with the next item."""
    order = list(items)
    for first in itertools.cycle(range(len(order))):
        yield order[first:] + order[:first]


def interleaved(
    items: Iterable[T],
    rounds: int,
    on_progress: Callable[[str], None],
    title: Callable[[T], str] = str,
    rotate: bool = False,
) -> Iterator[tuple[int, T]]:
    """Yield (round, item): every item once as warm-up round 0, then once in each of `rounds` rounds. Each round is
    announced before it begins. With `rotate` each round begins with another item, so that no item profits from its
    position."""
    orders = rotations(items) if rotate else itertools.repeat(list(items))
    for number, order in zip(range(rounds + 1), orders, strict=False):
        for item in order:
            on_progress(f"{f'round {number}/{rounds}' if number else 'warm-up'}: {title(item)}")
            yield number, item


@dataclass(frozen=True)
class RoundTimes:
    """The fastest of `rounds` for each backend. `is_stable`: for every backend, several rounds were about as fast as
    the fastest.
    """

    seconds: Mapping[Backend, float]
    rounds: int
    is_stable: bool


def time_in_rounds(
    steps: Mapping[Backend, Callable[[], object]],
    budget_seconds: float = BUDGET_SECONDS,
    clock: Callable[[], float] | None = None,
    hopeless: float = math.inf,
) -> RoundTimes:
    """Run each of `steps` once, then all in turn until the fastest rounds of each agree or the time is spent; return
    the fastest times.

    Args:
        steps: functions to time, by backend.
        budget_seconds: time limit per backend.
        clock: returns seconds.
        hopeless: the last of `steps` is not repeated if its first run takes longer than each other by this factor.
    """
    clock = clock or time.perf_counter

    def timed(backend: Backend) -> float:
        start = clock()
        steps[backend]()
        return clock() - start

    first = {backend: timed(backend) for backend in steps}
    *others, last = steps
    if others and first[last] > hopeless * max(first[backend] for backend in others):
        again = {backend: min(timed(backend) for _ in range(MIN_AGREEING_ROUNDS)) for backend in others}
        return RoundTimes({**first, **again}, 1, False)
    samples: dict[Backend, list[float]] = {backend: [] for backend in steps}
    began, rounds = clock(), 0
    for order in itertools.islice(rotations(steps), MAX_ROUNDS):
        for backend in order:
            samples[backend].append(timed(backend))
        rounds += 1
        spent = clock() - began >= budget_seconds * len(order)
        if (rounds >= MIN_ROUNDS and all(map(_agree, samples.values()))) or (spent and rounds >= MIN_AGREEING_ROUNDS):
            break
    quiet = all(map(_agree, samples.values()))
    return RoundTimes({backend: min(found) for backend, found in samples.items()}, rounds, quiet)


def _agree(samples: list[float]) -> bool:
    quick = sorted(samples)[:MIN_AGREEING_ROUNDS]
    return len(quick) == MIN_AGREEING_ROUNDS and quick[-1] <= AGREEMENT_RATIO * quick[0]
