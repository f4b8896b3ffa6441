"""Run one call from arrival to settlement, however it ends: finished, refused, left by its client, stopped or failed.

arrival -> admission -> stream begins -> pieces ... -> settlement
   \\__________ a client may leave, or the server fail the call, at any moment __________/
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

from workbench.serve.answers.pieces import Ended, Failed, Piece, PromptRead, Used
from workbench.serve.call import Call
from workbench.serve.errors import RETRY_SECONDS, STATUS, ApiError
from workbench.serve.gate import Lease, Outcome
from workbench.serve.served_model import PreparedPrompt
from workbench.serve.watch.traces import CallTrace

LOG = logging.getLogger(__name__)


class CallStream(Protocol):
    """The stream of one call's pieces, from the engine's requests or from a task.

    Attributes:
        used: the tokens used so far.
        ended: set when no part of the call runs any more.
        is_started: whether `start` was called.
    """

    ended: asyncio.Event

    @property
    def used(self) -> Used: ...

    @property
    def is_started(self) -> bool: ...

    def start(self) -> None: ...

    def cancel(self) -> None:
        """Cancel the call without waiting; `ended` is set at its end."""
        ...

    def abandon(self) -> None:
        """End the call without waiting for a stuck engine: `ended` is set at once or soon."""
        ...

    def wake(self) -> None:
        """Make a waiting `next` return now, even without pieces."""
        ...

    async def next(self) -> list[Piece] | None:
        """Return the pieces since the last call; an empty list after `wake`; None after the end."""
        ...


class CallRun:
    """The run of a call that has arrived. Its lease is settled once, with all generated tokens, even if the client
    left.

    Args:
        call: the parsed call.
        admit: asks the gate; ApiError if the call is refused.
        open_stream: prepares the admitted call; not called for an answer cached by the gate.
        on_settled: called at the very end; the trace has the outcome, or none if the call was not admitted.
    """

    def __init__(
        self,
        call: Call,
        admit: Callable[[Call], Awaitable[Lease]],
        open_stream: Callable[[CallTrace], Awaitable[CallStream]],
        on_settled: Callable[[CallRun], None],
    ):
        self._admit, self._open, self._on_settled = admit, open_stream, on_settled
        self.trace = CallTrace(call)
        self.lease: Lease | None = None
        self.prepared: tuple[Call, list[PreparedPrompt]] | None = (
            None  # prompts prepared for the gate or for the engine
        )
        self._steps: list[asyncio.Task[None]] = []  # tasks of admission and start, if begun
        self._halt: asyncio.Future[None] | None = None  # set if the call ends during a step
        self._stream: CallStream | None = None
        self._kept: list[Piece] | None = None
        self._used = Used()
        self._closed_choices: set[int] = set()
        self.is_complete = False  # all pieces were returned
        self._ended = ""  # as in `Outcome.ended`
        self._abort: ApiError | None = None
        self._settling: asyncio.Task[None] | None = None
        self.has_first_token = False
        self.first_token_seconds: float | None = None
        self.began = time.perf_counter()
        self.silent_since = self.began  # time of the last bytes sent to the client

    @property
    def call(self) -> Call:
        """Return the call: as the gate admitted it, or before that as it was parsed."""
        return self.trace.call

    async def admit(self) -> None:
        """Ask the gate to admit the call. The caller of this method must call `settle` in the end.

        Returns early if the client leaves meanwhile; a later admission is settled all the same.

        Raises:
            ApiError: if the call is refused, or was ended by `fail`.
        """
        await self._carry_out(self._pass_gate())

    async def start(self) -> None:
        """Prepare and submit the admitted call.

        Returns early, without pieces, if the client leaves meanwhile.

        Raises:
            ApiError: if the call cannot run, or was ended by `fail`.
        """
        await self._carry_out(self._begin())

    async def _carry_out(self, step: Coroutine[Any, Any, None]) -> None:
        """Wait until a step is done or the call has ended; in the latter case `settle` waits for the step."""
        if self._ended:
            step.close()
        else:
            task = asyncio.create_task(step)
            self._steps.append(task)
            self._halt = asyncio.get_running_loop().create_future()
            await asyncio.wait({task, self._halt}, return_when=asyncio.FIRST_COMPLETED)
            if not self._ended:
                task.result()
        if self._abort is not None:
            raise self._abort

    async def _pass_gate(self) -> None:
        self.lease = await self._admit(self.trace.call)
        self.trace.call = self.lease.call

    async def _begin(self) -> None:
        assert self.lease is not None, "admit a call before it is started"
        if self.lease.answer is not None:
            self._kept = list(self.lease.answer)
            return
        stream = await self._open(self.trace)
        if not self._ended:
            self._stream = stream
            stream.start()

    async def next(self) -> list[Piece] | None:
        """Return the pieces to write now; an empty list after `wake`; None after the end.

        Raises:
            ApiError: if the call failed, or was ended by `fail`.
        """
        pieces = await self._next()
        if self._abort is not None:
            raise self._abort
        if pieces is None or self.lease is None:
            return None
        shown: list[Piece] = []
        for piece in await self.lease.take(pieces):
            if piece.choice in self._closed_choices and not isinstance(piece, Used | Failed):
                continue
            shown.append(piece)
            if isinstance(piece, Ended):
                self._closed_choices.add(piece.choice)
                if piece.reason == "content_filter":
                    self._end("stopped")
            elif isinstance(piece, Used):
                self._used, self.is_complete = piece, True
                self._ended = self._ended or ("kept" if self._kept is not None else "finished")
            elif isinstance(piece, Failed):
                self._end("failed")
                kind = piece.kind if piece.kind in STATUS else "api_error"
                headers = {"retry-after": str(RETRY_SECONDS)} if kind == "overloaded_error" else {}
                raise self._noted(ApiError(kind, piece.message, headers=headers, detail=piece.detail))
        if not self.has_first_token and any(not isinstance(piece, PromptRead) for piece in shown):
            self.has_first_token = True
            self.first_token_seconds = time.perf_counter() - self.began
        return shown

    async def _next(self) -> list[Piece] | None:
        if self._kept is not None:
            pieces, self._kept = self._kept, []
            return pieces or None
        if self._stream is None or not self._stream.is_started:  # the client left before the start
            return None
        return await self._stream.next()

    def leave(self) -> None:
        """End the call because its client has left. May be called at any time, repeatedly."""
        if not self._ended:
            self._end("cancelled")
            self.wake()

    def fail(self, error: ApiError) -> None:
        """End the call with an error for the client."""
        if not self._ended:
            self._abort = self._noted(error)
            self._end("failed")
            self.wake()

    def _noted(self, error: ApiError) -> ApiError:
        """Move an error's detail to the trace and the log, and return it: the client sees only its message."""
        if error.detail:
            self.trace.failure = error.detail
            LOG.error("call %s failed: %s", self.call.id, error.detail)
        return error

    def abandon(self) -> None:
        """Stop waiting for the engine: the usage that it has reported so far counts as the call's usage."""
        self.leave()
        for step in self._steps:
            step.cancel()
        if self._stream is not None:
            self._stream.abandon()

    def wake(self) -> None:
        """Make `next` return now, with an empty list."""
        if self._stream is not None:
            self._stream.wake()

    @property
    def has_left(self) -> bool:
        return self._ended == "cancelled"

    @property
    def has_ended(self) -> bool:
        return bool(self._ended)

    def _end(self, how: str) -> None:
        self._ended = how
        if self._halt is not None and not self._halt.done():
            self._halt.set_result(None)
        if self._stream is not None:
            self._stream.cancel()

    async def settle(self) -> None:
        """Wait until the engine has ended the call, and settle the lease. Repeated calls settle it once."""
        if self._settling is None:
            if not self._ended:
                self._end("cancelled")
            self._settling = asyncio.create_task(self._settle())
        await asyncio.shield(self._settling)

    async def _settle(self) -> None:
        try:
            await asyncio.gather(*self._steps, return_exceptions=True)
            used = self._used
            if self._stream is not None:
                if self._stream.is_started:
                    await self._stream.ended.wait()
                used = self._stream.used
            if self.lease is not None:
                seconds = time.perf_counter() - self.began
                self.trace.outcome = Outcome(used, self._ended, seconds, self.first_token_seconds)
                await self.lease.settle(self.trace.outcome)
        finally:
            self._on_settled(self)
