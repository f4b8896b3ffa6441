"""Run work in threads outside of the event loop, with a deadline: user-defined functions, and rules on long texts.

A thread cannot be killed. One that does not return in time is abandoned and replaced; if too many are abandoned, work
is refused until one of them returns.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, TypeVar

from workbench.errors import WorkbenchError

Result = TypeVar("Result")
OnFailure = Literal["closed", "open"]  # if a check fails: refuse the call, or admit it unchecked


class WorkThreads:
    """A pool of worker threads for one event loop.

    Args:
        num_threads: maximum number of concurrent functions; others wait.
        max_hanging: maximum number of abandoned threads.
    """

    def __init__(self, num_threads: int = 2, max_hanging: int = 16):
        self._places = asyncio.Semaphore(num_threads)
        self._max_hanging, self.num_hanging = max_hanging, 0

    async def run(self, function: Callable[[], Result], seconds: float | None = None) -> Result:
        """Run `function()` in a thread, after waiting for a free one, and return its result.

        Raises:
            TimeoutError: the function has not returned within `seconds`.
            WorkbenchError: too many earlier functions have not returned.
            Exception: what the function raised.
        """
        if self.num_hanging >= self._max_hanging:
            raise WorkbenchError(f"{self.num_hanging} functions did not return in time and still run")
        loop = asyncio.get_running_loop()
        ends = None if seconds is None else loop.time() + seconds
        async with asyncio.timeout_at(ends):
            await self._places.acquire()
        done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

        def finish(value: Any, error: BaseException | None) -> None:
            if done.done():  # the thread was abandoned
                self.num_hanging -= 1
            else:
                self._places.release()
                done.set_result((value, error))

        def leave_alone() -> None:
            self.num_hanging += 1
            finish(None, TimeoutError("it did not return in time"))

        def work() -> None:
            try:
                found = function(), None
            except BaseException as error:  # also SystemExit, which must only end this function
                found = None, error
            with suppress(RuntimeError):  # the event loop has ended in the meantime
                loop.call_soon_threadsafe(finish, *found)

        if ends is not None:
            timer = loop.call_at(ends, leave_alone)
            done.add_done_callback(lambda _: timer.cancel())
        try:
            threading.Thread(target=work, name="gateway work", daemon=True).start()
        except RuntimeError as error:  # the system cannot start more threads
            finish(None, error)
        value, error = await asyncio.shield(done)  # the slot stays in use until then, even if the caller leaves
        if error is not None:
            raise error if isinstance(error, Exception) else WorkbenchError(f"{type(error).__name__}: {error}")
        return value
