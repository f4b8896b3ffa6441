"""Let the notebook's stop button stop work in other threads and processes."""

from __future__ import annotations

import weakref
from typing import Protocol

from workbench.progress import notebook_kernel


class Stoppable(Protocol):
    def stop(self) -> None: ...


_STOPPABLE: weakref.WeakSet[Stoppable] = weakref.WeakSet()


def register_stoppable(target: Stoppable) -> None:
    """Let the stop button stop `target` as long as it is referenced."""
    _STOPPABLE.add(target)
    install_stop_handler()


def install_stop_handler() -> None:
    """Install the handler of the stop button for the time when no cell runs.

    While a cell runs, the button interrupts the cell and all it waits for. The handler can be set only from within a
    cell or a widget's callback: call this before starting work in another thread.
    """
    kernel = notebook_kernel()
    if hasattr(kernel, "saved_sigint_handler"):
        # What ipykernel puts in force when the cell is over; by itself that ignores interrupts until the next.
        kernel.saved_sigint_handler = lambda *_: [each.stop() for each in tuple(_STOPPABLE)]
