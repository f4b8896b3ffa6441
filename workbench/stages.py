"""Long work told stage by stage: which one it is at, and the time that is left if they take as long, by and large."""

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
    """What is done now: a line as any other, which knows that `done` stages of `total` are over."""

    done: int
    total: int

    @classmethod
    def of(cls, line: str, done: int, total: int) -> Stage:
        stage = cls(line)
        stage.done, stage.total = done, total
        return stage


class Counted:
    """Passes lines on as stages: each is one of `total`, and begins when the one before is over."""

    def __init__(self, tell: Tell, total: int):
        self._tell, self._total, self._done = tell, total, 0

    def __call__(self, line: str) -> None:
        self._tell(Stage.of(line, self._done, self._total))
        self._done = min(self._done + 1, self._total)


@contextmanager
def stages(progress: bool = True) -> Iterator[Tell]:
    """A bar that is told lines. Of a Stage it shows how much is done and the time that is left, of others the time that
    is gone; it goes on while a stage takes long."""
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
    """The time that is gone is told anew meanwhile, whatever happens."""
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
