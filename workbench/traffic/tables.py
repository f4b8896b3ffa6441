"""Sample from tables: quantiles of distributions, and rates over time."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence


def quantile(table: Sequence[float], share: float) -> float:
    """Return the value below which a fraction `share` (0 to 1) of the values lies.

    `table` has the values at equally spaced quantiles, ends included."""
    place = share * (len(table) - 1)
    below = min(int(place), len(table) - 2)
    return table[below] + (table[below + 1] - table[below]) * (place - below)


def draw_from_quantiles(table: Sequence[float], rng: random.Random) -> int:
    return max(1, round(quantile(table, rng.random())))


def poisson_times(counts: Sequence[float], width: float, rng: random.Random) -> Iterator[float]:
    """Yield the times of a Poisson process with `counts` arrivals in periods of `width` seconds, repeated forever."""
    due, period = 0.0, 0
    waiting = rng.expovariate(1.0)  # how many are expected until the next one comes
    while True:
        expected = counts[period % len(counts)] * (1 - due)
        if waiting <= expected:
            due += waiting / counts[period % len(counts)]
            waiting = rng.expovariate(1.0)
            yield (period + due) * width
        else:
            waiting, due, period = waiting - expected, 0.0, period + 1
