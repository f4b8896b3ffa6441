"""Let the notebook's stop button also stop work in other threads and processes."""

from __future__ import annotations

import weakref
from typing import Protocol

from workbench.progress import notebook_kernel


class Stoppable(Protocol):
    def stop(self) -> None: ...


_STOPPABLE: weakref.WeakSet[Stoppable] = weakref.WeakSet()


def register_stoppable(target: Stoppable) -> None:
    """Make the notebook's stop button call `target.stop()`, as long as `target` is referenced."""
    _STOPPABLE.add(target)
    install_stop_handler()


def install_stop_handler() -> None:
    """Make the notebook's stop button work while no cell runs: it then stops all registered targets.

    While a cell runs, the button interrupts the cell and all it waits for. The handler can be set only from within a
    cell or a widget's callback: call this before starting work in another thread.
    """
    kernel = notebook_kernel()
    if hasattr(kernel, "saved_sigint_handler"):
        # What ipykernel puts in force when the cell is over; by itself that ignores interrupts until the next.
        kernel.saved_sigint_handler = lambda *_: [each.stop() for each in tuple(_STOPPABLE)]
