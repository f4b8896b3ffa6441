"""Run work beside the event loop, with a deadline: user-defined functions, and rules on long texts.

A thread cannot be ended from outside. One that does not return in time is left alone, and another takes its place;
where too many are left, work is refused until one of them returns.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, TypeVar

from workbench.errors import WorkbenchError

Result = TypeVar("Result")
OnFailure = Literal["closed", "open"]  # where a check fails: refuse the call, or let it through unchecked


class WorkThreads:
    """Threads of one event loop.

    Args:
        num_threads: pieces of work at once; more wait for their turn.
        max_hanging: threads that may be left alone.
    """

    def __init__(self, num_threads: int = 2, max_hanging: int = 16):
        self._places = asyncio.Semaphore(num_threads)
        self._max_hanging, self.num_hanging = max_hanging, 0

    async def run(self, function: Callable[[], Result], seconds: float | None = None) -> Result:
        """Return `function()`, which may wait for its turn first.

        Raises:
            TimeoutError: it has not returned within `seconds`.
            WorkbenchError: too many pieces of work before it never returned.
            Exception: what the function raised.
        """
        if self.num_hanging >= self._max_hanging:
            raise WorkbenchError(f"{self.num_hanging} pieces of work did not return in time and still run")
        loop = asyncio.get_running_loop()
        ends = None if seconds is None else loop.time() + seconds
        async with asyncio.timeout_at(ends):
            await self._places.acquire()
        work = _Work(self, function, loop)
        if ends is not None:
            work.timer = loop.call_at(ends, work.leave_alone)
        try:
            threading.Thread(target=work.run, name="gateway work", daemon=True).start()
        except RuntimeError as error:  # the machine has no more threads
            work.finish((None, error))
        value, error = await work.done
        if error is not None:
            raise error if isinstance(error, Exception) else WorkbenchError(f"{type(error).__name__}: {error}")
        return value

    def let_go(self, is_hanging: bool) -> None:
        """Free the place of a piece of work that has ended, or that hangs."""
        self.num_hanging += is_hanging
        self._places.release()


class _Work:
    """One piece of work. Its place is free again when it ends or is left alone, also where its caller was cancelled."""

    def __init__(self, threads: WorkThreads, function: Callable[[], Any], loop: asyncio.AbstractEventLoop):
        self._threads, self._function, self._loop = threads, function, loop
        self.done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
        self.timer: asyncio.TimerHandle | None = None
        self._is_left = False

    def run(self) -> None:
        try:
            found: tuple[Any, BaseException | None] = self._function(), None
        except BaseException as error:  # also SystemExit: it is the work's, and no reason to end anything else
            found = None, error
        with suppress(RuntimeError):  # the loop has ended meanwhile
            self._loop.call_soon_threadsafe(self.finish, found)

    def leave_alone(self) -> None:
        self._is_left = True
        self._threads.let_go(is_hanging=True)
        if not self.done.done():
            self.done.set_result((None, TimeoutError("it did not return in time")))

    def finish(self, found: tuple[Any, BaseException | None]) -> None:
        if self._is_left:
            self._threads.num_hanging -= 1
            return
        if self.timer is not None:
            self.timer.cancel()
        self._threads.let_go(is_hanging=False)
        if not self.done.done():
            self.done.set_result(found)
