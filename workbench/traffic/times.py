"""Generators of arrival times in seconds, never decreasing, by kind of arrival settings."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from workbench.traffic.settings import AtOnce, Bursts, Poisson


def arrivals_at_once(settings: AtOnce, rng: random.Random) -> Iterator[float]:
    while True:
        yield 0.0


def poisson_arrivals(settings: Poisson, rng: random.Random) -> Iterator[float]:
    now = 0.0
    while True:
        now += rng.expovariate(settings.rate)
        yield now


def burst_arrivals(settings: Bursts, rng: random.Random) -> Iterator[float]:
    now = 0.0
    while True:
        now += rng.expovariate(settings.rate / settings.size)
        for _ in range(settings.size):
            yield now


TIMES: dict[type, Callable[..., Iterator[float]]] = {AtOnce: arrivals_at_once, Poisson: poisson_arrivals, Bursts: burst_arrivals}
