"""The kernel's stop button, pressed while no cell runs: what goes on in other threads hears it."""

from __future__ import annotations

import weakref
from typing import Protocol

from workbench.progress import notebook_kernel


class Stoppable(Protocol):
    def stop(self) -> None: ...


_GOING: weakref.WeakSet[Stoppable] = weakref.WeakSet()


def reached(each: Stoppable) -> None:
    """From now on the button stops `each`, as long as anybody has it."""
    _GOING.add(each)
    hear_stop_button()


def hear_stop_button() -> None:
    """While a cell runs, the button ends the cell, and with it what the cell waits for. That it is heard otherwise can
    only be set where a cell, or a widget's answer, is at it: who begins work in another thread calls this before."""
    kernel = notebook_kernel()
    if hasattr(kernel, "saved_sigint_handler"):
        # What ipykernel puts in force when the cell is over; by itself that ignores interrupts until the next.
        kernel.saved_sigint_handler = lambda *_: [each.stop() for each in tuple(_GOING)]
