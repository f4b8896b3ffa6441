"""Prepare prompts outside of the event loop, in a few threads that serve tenants in turn."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


class PromptThreads:
    """Threads of one event loop that prepare prompts. A tenant with many prompts delays another tenant by one prompt at
    most.

    waiting: tenant -> its prompts, oldest first; the tenant whose turn is next is the first
    """

    def __init__(self, num_threads: int):
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="prompts")
        self._num_free = num_threads
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def run(self, tenant: str, function: Callable[[], Result]) -> Result:
        """Run `function()` in a thread when it is the tenant's turn, and return its result. If this coroutine is
        cancelled while it waits, the function does not run.
        """
        loop = asyncio.get_running_loop()
        await self._wait_for_turn(tenant)
        running = self._pool.submit(function)

        def release(_: object) -> None:  # called in the thread at its end, even if the caller has left
            with contextlib.suppress(RuntimeError):  # the loop is closed: no prompt waits
                loop.call_soon_threadsafe(self._pass_on)

        running.add_done_callback(release)
        return await asyncio.wrap_future(running)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _wait_for_turn(self, tenant: str) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the thread was free just as the caller left
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """Give a free thread to the next prompt, with tenants in turn."""
        while self._waiting:
            tenant, line = self._waiting.popitem(last=False)
            while line and line[0].done():  # its caller has left: it takes no turn
                line.popleft()
            if line:
                line.popleft().set_result(None)
                if line:
                    self._waiting[tenant] = line
                return
        self._num_free += 1
