"""Pass the events of a call from its runner's thread to the event loop, as lists of pieces.

runner's thread: step, emit, emit, ... ---one wake-up a step---> event loop: pieces of each call ---> its client
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from workbench.cluster.cluster import Cluster
from workbench.engine.runner_thread import RunnerThread
from workbench.errors import describe_error
from workbench.serve.answers.answer_pieces import AnswerPieces
from workbench.serve.answers.pieces import Failed, Piece, Used
from workbench.serve.call import Call
from workbench.serve.errors import ENGINE_FAILED, SERVER_FAILED
from workbench.serve.memory.call_memory import CallMemory, CallRecorder
from workbench.serve.served_model import PreparedPrompt, ServedModel
from workbench.trace.events import Event, Stepped

LOG = logging.getLogger(__name__)
SLOW_READER = "the client does not read the generated text; read the stream while it is sent"


class StepBridge:
    """A bridge from one runner's thread to an event loop. It wakes the loop once per step for the events of
    all calls.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, thread: RunnerThread | Cluster):
        self._loop = loop
        self._batch: list[tuple[EngineStream, list[Event], bool, str]] = []  # used by the runner's thread only
        self.close = thread.after_delivery(self._flush)

    def add(self, stream: EngineStream, events: list[Event], done: bool, error: str) -> None:
        self._batch.append((stream, events, done, error))

    def _flush(self) -> None:
        if not self._batch:
            return
        batch, self._batch = self._batch, []
        try:
            self._loop.call_soon_threadsafe(_deliver, batch)
        except RuntimeError:  # the loop is closed: no client is left
            return


def _engine_failed(error: str) -> Failed:
    return Failed(status=503, kind="unavailable_error", message=ENGINE_FAILED, detail=error)


def _deliver(batch: list[tuple[EngineStream, list[Event], bool, str]]) -> None:
    for stream, events, done, error in batch:
        try:
            stream.receive(events, done, error)
        except Exception as fault:  # any error ends this call alone; others get their events
            LOG.error("a call failed while its events were read", exc_info=fault)
            stream.fail(fault, done)


class EngineStream:
    """A call that the engine runs. All methods but `emit` belong to the event loop's thread.

    Args:
        call: the call.
        model: the model that answers.
        prepared: the prepared prompts.
        bridge: the bridge to the event loop.
        keep: receives all events, for the trace.
        max_buffered: maximum pieces waiting for a slow client; beyond it the call is cancelled.
        memory: the server's memory of calls.
    """

    def __init__(
        self,
        call: Call,
        model: ServedModel,
        prepared: Sequence[PreparedPrompt],
        bridge: StepBridge,
        keep: Callable[[list[Event]], None],
        max_buffered: int,
        memory: CallMemory | None = None,
    ):
        self._model, self._prepared, self._bridge = model, prepared, bridge
        self._pieces = AnswerPieces(call, prepared, model.tokenizer)
        self._recorder = None if memory is None else CallRecorder(memory, call, model, prepared)
        self._keep, self._max_buffered = keep, max_buffered
        self._buffer: list[Piece] = []
        self._waiter: asyncio.Future[None] | None = None
        self._cancel: Callable[[], None] | None = None
        self._is_cancelled = self._has_failed = False
        self.ended = asyncio.Event()  # set when the engine has ended all of its requests

    def start(self) -> None:
        """Submit the call's requests to the engine."""
        self._cancel = self._model.thread.submit_to(self, [each.request for each in self._prepared])

    def cancel(self) -> None:
        """Cancel running requests; their pages are free within one step. Only the first call has an effect."""
        if not self._is_cancelled and not self.ended.is_set() and self._cancel is not None:
            self._is_cancelled = True
            self._cancel()

    def abandon(self) -> None:
        """End the call without waiting for the engine, which no longer answers."""
        self.cancel()
        self.ended.set()
        self.wake()

    @property
    def used(self) -> Used:
        return self._pieces.used

    @property
    def is_started(self) -> bool:
        return self._cancel is not None

    def emit(self, events: list[Event], done: bool = False, error: str = "") -> None:
        """Take events in the runner's thread; they are passed to the event loop once all events of the step have
        arrived.
        """
        if done or any(not isinstance(event, Stepped) for event in events):
            self._bridge.add(self, events, done, error)

    def receive(self, events: list[Event], done: bool, error: str) -> None:
        """Take the events of a step in the event loop."""
        self._keep(events)
        pieces = self._pieces.push(events)
        if self._recorder is not None:
            self._recorder.take(pieces)
        if self._pieces.failure is not None:
            self.cancel()
        if done:
            self.ended.set()
            if self._pieces.failure is None:
                pieces.append(_engine_failed(error) if error else self.used)
        if not self._has_failed:
            self._buffer += pieces
        if len(self._buffer) > self._max_buffered and not done and not self._has_failed:
            self.cancel()
            self._buffer.append(Failed(status=503, kind="unavailable_error", message=SLOW_READER))
            self._has_failed = True
        self.wake()

    def fail(self, fault: Exception, done: bool) -> None:
        """End the call after an internal error while its events were converted; `done`: no events follow."""
        failure = Failed(message=SERVER_FAILED, detail=describe_error(fault))
        self._pieces.failure = self._pieces.failure or failure  # further events are not read
        if not self._has_failed:
            self._buffer.append(failure)
            self._has_failed = True
        if done:
            self.ended.set()
        self.cancel()
        self.wake()

    async def next(self) -> list[Piece] | None:
        """Return the pieces since the last call; an empty list after `wake`; None after the end."""
        if not self._buffer:
            if self.ended.is_set() or self._has_failed:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        pieces, self._buffer = self._buffer, []
        return pieces

    def wake(self) -> None:
        """Make `next` return now, even without pieces."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
