"""Show the progress of long work, and the remaining time, as one line of text.

The line is rewritten in a terminal and in a cell's output. A file or a pipe, which cannot be rewritten, gets a line
every half minute. Work in stages shows the current stage; its remaining time assumes equal stages. tqdm's own notebook
bar is a widget: a saved or exported notebook does not show it, and `leave=False` breaks in JupyterLab 4 (ipywidgets
issue 3821).
"""

from __future__ import annotations

import io
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm.std import tqdm

NOTEBOOK_COLUMNS = 100  # maximum characters of a line in a notebook
LINE_INTERVAL_SECONDS = 30.0  # between lines in a file or a pipe
REFRESH_SECONDS = 2.0  # seconds
BAR_FORMAT = "{desc} {percentage:3.0f}%|{bar}| {elapsed} gone, {remaining} left"
SPINNER_FORMAT = "{desc} [{elapsed}]"
ProgressCallback = Callable[[str], None]
SLOW_SECONDS, AGAIN_SECONDS = 3.0, 60.0  # seconds until the first line about a wait, and between lines


class Progress(tqdm):
    """A tqdm bar. In a notebook its last line stays; in a file or a pipe, work that ends soon leaves no line."""

    def __init__(self, *args: Any, **settings: Any):
        if in_notebook():
            settings = {"file": io.StringIO(), "ncols": NOTEBOOK_COLUMNS, **settings}
        elif not is_terminal(file := settings.get("file") or sys.stderr):
            settings = {**settings, "file": _Lines(file), "ncols": NOTEBOOK_COLUMNS}
        super().__init__(*args, **settings)

    @staticmethod
    def status_printer(file: Any) -> Callable[[str], None]:
        return _display() if in_notebook() else tqdm.status_printer(file)


def is_terminal(file: Any) -> bool:
    """Return whether a line of `file` can be rewritten."""
    return bool(getattr(file, "isatty", lambda: False)())


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    return notebook_kernel() is not None


def notebook_kernel() -> Any:
    """Return the ipykernel of this process; None in a terminal."""
    ipython = sys.modules.get("IPython")
    return getattr(ipython.get_ipython() if ipython is not None else None, "kernel", None)


def _display() -> Callable[[str], None]:
    from IPython.display import display

    handle: Any = None

    def show(line: str) -> None:
        nonlocal handle
        if not line.strip():
            return  # how tqdm clears a line
        bundle = {"text/plain": line.strip("\r\n")}
        if handle is None:
            handle = display(bundle, raw=True, display_id=True)
        else:
            handle.update(bundle, raw=True)

    return show


class _Lines:
    """A writer of whole bar lines to `file`, at least `LINE_INTERVAL_SECONDS` apart and after the start."""

    def __init__(self, file: Any):
        self.file, self.last = file, time.monotonic()

    def write(self, text: str) -> None:
        now = time.monotonic()
        if (line := text.strip()) and now - self.last >= LINE_INTERVAL_SECONDS:
            self.last = now
            self.file.write(f"{line}\n")

    def flush(self) -> None:
        self.file.flush()


class ProgressStage(str):
    """A progress line that also says how many of its work's stages are finished: `done` of `total`."""

    done: int
    total: int

    @classmethod
    def create(cls, line: str, done: int, total: int) -> ProgressStage:
        stage = cls(line)
        stage.done, stage.total = done, total
        return stage


class StageCounter:
    """A callback for progress lines. Each line begins the next of `total` stages and ends the previous one."""

    def __init__(self, tell: ProgressCallback, total: int):
        self._tell, self._total, self._done = tell, total, 0

    def __call__(self, line: str) -> None:
        self._tell(ProgressStage.create(line, self._done, self._total))
        self._done = min(self._done + 1, self._total)


@contextmanager
def progress_stages(progress: bool = True) -> Iterator[ProgressCallback]:
    """Show a bar and yield the callback that receives its progress lines. The bar shows the remaining time after a
    ProgressStage, and the elapsed time after other lines.
    """
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
    """Refresh the elapsed time that `bar` shows, while the block runs."""
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


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def discard(line: str) -> None:
    """Do nothing with a progress line, for callers whose output must stay clean."""


@contextmanager
def report_if_slow(
    line: str,
    report: Callable[[str], None],
    seconds: float | None = None,
    usual: float | None = None,
    limit: float | None = None,
    again: float = AGAIN_SECONDS,
    share: Callable[[], float] | None = None,
) -> Iterator[None]:
    """Report `line` once the block has taken `seconds` (default 3), and then every `again` seconds with the elapsed
    time; shorter blocks report no line. The remaining time is added if the usual duration (`usual`), the finished
    fraction (`share`) or the timeout (`limit`) is known.
    """
    over, began, first = threading.Event(), time.perf_counter(), SLOW_SECONDS if seconds is None else seconds

    def tell() -> None:
        wait, is_first = first, True
        while not over.wait(wait):
            gone, done = time.perf_counter() - began, share() if share is not None else 0.0
            report(line + _waiting_words(gone, gone / done if done else usual, is_first, limit))
            wait, is_first = again, False

    threading.Thread(target=tell, name="slow", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _waiting_words(gone: float, usual: float | None, is_first: bool, limit: float | None = None) -> str:
    """Return the text for a wait of `gone` seconds so far."""
    left = "" if usual is None else f"about {usual - gone:.0f} s still" if gone < usual else "longer than usual"
    if limit is not None:
        left = f"given up in {limit - gone:.0f} s"
    if is_first:
        return f" ({left})" if left else ""
    return f": {gone:.0f} s so far" + (f", {left}" if left else "")
