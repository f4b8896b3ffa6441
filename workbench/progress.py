"""How far long work is, and the time that is left: a line in a terminal, a line of a cell's output in a notebook.

tqdm's own notebook bar is a widget: a saved or exported notebook does not show it, and `leave=False` breaks in
JupyterLab 4 (ipywidgets issue 3821). A line of text that is written anew is shown everywhere.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any

from tqdm.std import tqdm

WIDTH = 100  # letters of a line in a notebook


class Progress(tqdm):
    """A tqdm bar. In a notebook its last line stays in the output as it stood at the end."""

    def __init__(self, *args: Any, **settings: Any):
        if in_notebook():
            settings = {"file": io.StringIO(), "ncols": WIDTH, **settings}
        super().__init__(*args, **settings)

    @staticmethod
    def status_printer(file: Any) -> Callable[[str], None]:
        return _display() if in_notebook() else tqdm.status_printer(file)


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
