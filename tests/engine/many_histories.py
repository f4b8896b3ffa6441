"""Many random histories without hypothesis: `python -m tests.engine.many_histories [--histories 10000] [--seed N]`.

A history is its seed: what fails is played again, with its traceback, by that seed.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import Annotated

import typer

from tests.engine.history import LAYOUTS, POLICIES, SIZE, STOPS, History

MOVES = 30
SHARE = 100  # histories that a process plays before it tells


def play(seed: int) -> None:
    """One history, chosen by `seed` as hypothesis chooses in test_histories, to its end. AssertionError where a law
    does not hold."""
    draw, history = random.Random(seed), History()
    history.begin(
        policy=draw.choice(POLICIES), tables=draw.choice(LAYOUTS), pages=draw.randint(10, 16),
        prefix=draw.random() < 0.5, saves=draw.random() < 0.5, host=draw.choice([0, 6, 20]),
        ttl=draw.choice([None, 5.0]), seed=draw.randrange(10**6),
    )  # fmt: skip
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
            play(seed)
        except Exception as error:
            failed[seed] = f"{type(error).__name__}: {error}"
    return failed


def main(
    histories: Annotated[int, typer.Option(min=1)] = 10_000,
    seed: Annotated[int | None, typer.Option(help="play this one history, with its traceback")] = None,
) -> None:
    """Random histories of submit, cancel, stop, break, evict on the scheduler, every page and read checked."""
    if seed is not None:
        play(seed)
        print(f"history {seed}: all laws hold")
        return
    began = time.perf_counter()
    shares = [range(first, min(first + SHARE, histories)) for first in range(0, histories, SHARE)]
    with ProcessPoolExecutor(os.cpu_count()) as others:
        failed = {which: error for found in others.map(run, shares) for which, error in found.items()}
    print(f"{histories} histories in {time.perf_counter() - began:.1f} s, {len(failed)} failed")
    for which, error in list(failed.items())[:10]:
        print(f"  --seed {which}: {' '.join(error.split())[:200]}")
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)
