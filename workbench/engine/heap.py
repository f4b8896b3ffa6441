"""Return freed memory of the C library's heap to the system."""

from __future__ import annotations

import ctypes


def trim_heap() -> None:
    """Return memory that was freed but kept for later (glibc's malloc_trim; elsewhere nothing happens).

    Creating or converting weights leaves a hundred megabytes of freed pieces that decode never asks for again.
    """
    try:
        release = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # not glibc
        return
    release(0)
