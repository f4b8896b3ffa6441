"""Random histories of submit, cancel, stop, break, evict on the scheduler, every page and read checked.

A history is what it draws: one of hypothesis's is made small where it fails, one of a seed is played again by it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from tests.engine.history import SIZE, STOPS, History

MOVES = 30


def play(draw: random.Random, history: History | None = None) -> None:
    """Play one history to its end. AssertionError where a law does not hold."""
    history = history or History()
    history.begin_any(draw)
    for _ in range(draw.randint(1, MOVES)):
        move(history, draw)
        history.check()
    history.finish()


def move(history: History, draw: random.Random) -> None:
    what = draw.choice(["submit", "submit", "step", "step", "stop", "evict", "wait"])
    if what == "submit":
        shared = draw.choice([draw.randint(0, 30), SIZE * draw.randint(1, 6)])
        history.submit(
            shared, own=draw.choice([draw.randint(0, 9), 1]), most=draw.randint(1, 12),
            samples=draw.choice([1, 1, 2, 3, 6]), beams=draw.random() < 0.3, salt=draw.choice(["", "", "b"]),
            which=draw.randint(0, 1),
        )  # fmt: skip
    elif what == "step":
        history.step(draw.randint(1, 6))
    elif what == "stop":
        history.stop(draw.randrange(30), draw.choice(STOPS))
    elif what == "evict":
        history.evict(draw.randint(0, 2), draw.randint(1, 4), everything=draw.random() < 0.25)
    else:
        history.wait(draw.uniform(0, 4))


def run(seeds: Iterable[int]) -> dict[int, str]:
    """Return each failure by the seed of its history."""
    failed = {}
    for seed in seeds:
        try:
            play(random.Random(seed))
        except Exception as error:
            failed[seed] = f"{type(error).__name__}: {error}"
    return failed
