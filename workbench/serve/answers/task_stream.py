"""Run a call that bypasses the engine's scheduler, as a task: all its pieces come together at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from workbench.serve.answers.pieces import Piece, Used


class TaskStream:
    """The stream of a call that a coroutine answers. It belongs to the event loop's thread.

    Args:
        work: returns the pieces, `Used` last; `next` raises its errors. Its argument receives the number of prompt
            tokens as their computation begins, in any thread: a client that leaves pays for them.
    """

    def __init__(self, work: Callable[[Callable[[int], None]], Coroutine[Any, Any, Sequence[Piece]]]):
        self._work = work
        self._task: asyncio.Task[None] | None = None
        self._pieces: list[Piece] | None = None
        self._error: Exception | None = None
        self._awake = asyncio.Event()
        self.used = Used()
        self.ended = asyncio.Event()

    @property
    def is_started(self) -> bool:
        return self._task is not None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(lambda _: self._end())  # also if cancelled before it began

    async def _run(self) -> None:
        try:
            self._pieces = list(await self._work(self._count))
            self.used = next((each for each in self._pieces if isinstance(each, Used)), self.used)
        except Exception as error:  # any error: the client sees it in its protocol
            self._error = error

    def _count(self, prompt_tokens: int) -> None:
        self.used = Used(prompt_tokens=self.used.prompt_tokens + prompt_tokens)

    def _end(self) -> None:
        self.ended.set()
        self.wake()

    async def next(self) -> list[Piece] | None:
        """Return all pieces; an empty list after `wake`; None after the end, and if the call was cancelled."""
        await self._awake.wait()
        if not self.ended.is_set():
            self._awake.clear()
            return []
        if self._error is not None:
            raise self._error
        pieces, self._pieces = self._pieces, None
        return pieces

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def abandon(self) -> None:
        """Cancel the task without waiting for it: it ends at once."""
        self.cancel()

    def wake(self) -> None:
        """Make a waiting `next` return now, with an empty list."""
        self._awake.set()
