"""Show the progress of long work, and the remaining time, as one line of text.

The line is rewritten in a terminal and in a cell's output. A file or a pipe, which cannot be rewritten, gets a line
every half minute. tqdm's own notebook bar is a widget: a saved or exported notebook does not show it, and `leave=False`
breaks in JupyterLab 4 (ipywidgets issue 3821).
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable
from typing import Any

from tqdm.std import tqdm

NOTEBOOK_COLUMNS = 100  # letters of a line in a notebook
LINE_INTERVAL_SECONDS = 30.0  # between lines of a file or a pipe


class Progress(tqdm):
    """A tqdm bar. In a notebook its last line stays; in a file or a pipe short work leaves nothing."""

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
    """Return whether this is the kernel of a notebook."""
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
    """A writer of whole bar lines to `file`, at least `LINE_INTERVAL_SECONDS` apart, the first no sooner."""

    def __init__(self, file: Any):
        self.file, self.last = file, time.monotonic()

    def write(self, text: str) -> None:
        now = time.monotonic()
        if (line := text.strip()) and now - self.last >= LINE_INTERVAL_SECONDS:
            self.last = now
            self.file.write(f"{line}\n")

    def flush(self) -> None:
        self.file.flush()
