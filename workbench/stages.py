"""Show long work by stages: the present one, and an estimate of the remaining time from equal stages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from workbench.progress import Progress

REFRESH_SECONDS = 2.0  # seconds
BAR_FORMAT = "{desc} {percentage:3.0f}%|{bar}| {elapsed} gone, {remaining} left"
SPINNER_FORMAT = "{desc} [{elapsed}]"
ProgressCallback = Callable[[str], None]


class ProgressStage(str):
    """A progress line that knows that `done` stages of `total` are finished."""

    done: int
    total: int

    @classmethod
    def create(cls, line: str, done: int, total: int) -> ProgressStage:
        stage = cls(line)
        stage.done, stage.total = done, total
        return stage


class StageCounter:
    """Pass lines on as stages: each is one of `total`, and begins when the one before is finished."""

    def __init__(self, tell: ProgressCallback, total: int):
        self._tell, self._total, self._done = tell, total, 0

    def __call__(self, line: str) -> None:
        self._tell(ProgressStage.create(line, self._done, self._total))
        self._done = min(self._done + 1, self._total)


@contextmanager
def progress_stages(progress: bool = True) -> Iterator[ProgressCallback]:
    """Show a bar and yield its callback: for a stage the remaining time, for other lines the elapsed time."""
    with Progress(total=1.0, bar_format=SPINNER_FORMAT, disable=not progress) as bar, refreshing(bar):

        def tell(line: str) -> None:
            if isinstance(line, ProgressStage):
                bar.bar_format, bar.n = BAR_FORMAT, line.done / line.total
            bar.set_description_str(line)

        yield tell
        if not bar.disable and bar.bar_format == BAR_FORMAT:
            bar.n = 1.0


@contextmanager
def refreshing(bar: Progress) -> Iterator[None]:
    """Refresh the elapsed time while the block runs."""
    over = threading.Event()

    def tick() -> None:
        while not over.wait(REFRESH_SECONDS):
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
