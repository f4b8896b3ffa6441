"""Wait until a word in shared memory changes, without busy waiting, by Linux's futex."""

from __future__ import annotations

import ctypes
import mmap
import platform
import sys
import time

SYSTEM_CALL = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
WAIT, WAKE, ALL_WAITERS = 0, 1, 2**31 - 1
WORD_STRIDE = 16  # in words of four bytes: each word has its own cache line


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def shared_memory_problem() -> str | None:
    """Return why processes on this machine cannot wait for each other in shared memory; None if they can.

    Numbers are written before the word that announces them; processors other than x86 may reorder these writes.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"ranks exchange numbers in shared memory on Linux with x86-64, not {sys.platform} {platform.machine()}"
    return None


class Words:
    """Integers (words) at the start of a memory map that processes share. Only one process writes each word."""

    def __init__(self, memory: mmap.mmap, count: int):
        self._view = memoryview(memory).cast("I")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._call = ctypes.CDLL(None, use_errno=True).syscall
        self.count = count

    @staticmethod
    def bytes_of(count: int) -> int:
        return count * WORD_STRIDE * 4

    def __getitem__(self, word: int) -> int:
        return self._view[word * WORD_STRIDE]

    def publish(self, word: int, value: int) -> None:
        """Set a word and wake the processes that wait for it."""
        self._view[word * WORD_STRIDE] = value
        self._futex(word, WAKE, ALL_WAITERS, None)

    def sleep(self, word: int, seen: int, seconds: float) -> None:
        """Sleep until the word differs from `seen`, or `seconds` have passed."""
        if self._futex(word, WAIT, seen, _Timespec(int(seconds), int(seconds % 1 * 1e9))) < 0:
            time.sleep(0)

    def _futex(self, word: int, operation: int, value: int, timeout: _Timespec | None) -> int:
        address = ctypes.c_void_p(self._address + word * WORD_STRIDE * 4)
        until = None if timeout is None else ctypes.byref(timeout)
        return self._call(SYSTEM_CALL, address, operation, ctypes.c_uint32(value), until, None, 0)
