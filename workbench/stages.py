"""Show long work by stages: the present one, and an estimate of the remaining time from equal stages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from workbench.progress import Progress

TICK = 2.0  # seconds
BAR = "{desc} {percentage:3.0f}%|{bar}| {elapsed} gone, {remaining} left"
UNKNOWN = "{desc} [{elapsed}]"
Tell = Callable[[str], None]


class Stage(str):
    """A progress line that knows that `done` stages of `total` are finished."""

    done: int
    total: int

    @classmethod
    def of(cls, line: str, done: int, total: int) -> Stage:
        stage = cls(line)
        stage.done, stage.total = done, total
        return stage


class Counted:
    """Pass lines on as stages: each is one of `total`, and begins when the one before is finished."""

    def __init__(self, tell: Tell, total: int):
        self._tell, self._total, self._done = tell, total, 0

    def __call__(self, line: str) -> None:
        self._tell(Stage.of(line, self._done, self._total))
        self._done = min(self._done + 1, self._total)


@contextmanager
def stages(progress: bool = True) -> Iterator[Tell]:
    """Show a bar and yield its callback: for a stage the remaining time, for other lines the elapsed time."""
    with Progress(total=1.0, bar_format=UNKNOWN, disable=not progress) as bar, ticking(bar):

        def tell(line: str) -> None:
            if isinstance(line, Stage):
                bar.bar_format, bar.n = BAR, line.done / line.total
            bar.set_description_str(line)

        yield tell
        if not bar.disable and bar.bar_format == BAR:
            bar.n = 1.0


@contextmanager
def ticking(bar: Progress) -> Iterator[None]:
    """Refresh the elapsed time while the block runs."""
    over = threading.Event()

    def tick() -> None:
        while not over.wait(TICK):
            bar.refresh()

    ticker = threading.Thread(target=tick, daemon=True)
    if not bar.disable:
        ticker.start()
    try:
        yield
    finally:
        over.set()
        if not bar.disable:
            ticker.join()
