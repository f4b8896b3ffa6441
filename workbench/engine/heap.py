"""The C library's heap: what loading left behind goes back to the system."""

from __future__ import annotations

import ctypes


def trim() -> None:
    """Give back what was freed but kept for later (glibc's malloc_trim; elsewhere nothing happens).

    Drawing or converting weights leaves a hundred megabytes of freed pieces that decode never asks for again.
    """
    try:
        release = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # not glibc
        return
    release(0)
