"""Generators of arrival times in seconds, never decreasing, by kind of arrival settings."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from workbench.traffic.settings import AtOnce, Bursts, Poisson


def at_once(part: AtOnce, draw: random.Random) -> Iterator[float]:
    while True:
        yield 0.0


def poisson(part: Poisson, draw: random.Random) -> Iterator[float]:
    now = 0.0
    while True:
        now += draw.expovariate(part.rate)
        yield now


def bursts(part: Bursts, draw: random.Random) -> Iterator[float]:
    now = 0.0
    while True:
        now += draw.expovariate(part.rate / part.size)
        for _ in range(part.size):
            yield now


TIMES: dict[type, Callable[..., Iterator[float]]] = {AtOnce: at_once, Poisson: poisson, Bursts: bursts}
