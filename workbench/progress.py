"""How far long work is, and the time that is left: one line that is written anew in a terminal, one line of a cell's
output in a notebook, and elsewhere, where nothing can be written anew, a line each half minute.

tqdm's own notebook bar is a widget: a saved or exported notebook does not show it, and `leave=False` breaks in
JupyterLab 4 (ipywidgets issue 3821). A line of text that is written anew is shown everywhere.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable
from typing import Any

from tqdm.std import tqdm

WIDTH = 100  # letters of a line in a notebook
EVERY_SECONDS = 30.0  # between lines of a file or a pipe


class Progress(tqdm):
    """A tqdm bar. In a notebook its last line stays in the output as it stood at the end; in a file or a pipe work that
    takes less than `EVERY_SECONDS` leaves nothing."""

    def __init__(self, *args: Any, **settings: Any):
        if in_notebook():
            settings = {"file": io.StringIO(), "ncols": WIDTH, **settings}
        elif not is_terminal(file := settings.get("file") or sys.stderr):
            settings = {**settings, "file": _Lines(file), "ncols": WIDTH}
        super().__init__(*args, **settings)

    @staticmethod
    def status_printer(file: Any) -> Callable[[str], None]:
        return _display() if in_notebook() else tqdm.status_printer(file)


def is_terminal(file: Any) -> bool:
    """Whether a line of `file` can be written anew."""
    return bool(getattr(file, "isatty", lambda: False)())


def in_notebook() -> bool:
    """Whether this is the kernel of a notebook."""
    return notebook_kernel() is not None


def notebook_kernel() -> Any:
    """The ipykernel that this process is; None in a terminal."""
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
    """Takes a bar's texts and leaves whole lines in `file`, `EVERY_SECONDS` apart at least, the first no sooner."""

    def __init__(self, file: Any):
        self.file, self.last = file, time.monotonic()

    def write(self, text: str) -> None:
        now = time.monotonic()
        if (line := text.strip()) and now - self.last >= EVERY_SECONDS:
            self.last = now
            self.file.write(f"{line}\n")

    def flush(self) -> None:
        self.file.flush()
