"""Run a runner in one thread that widgets and notebook cells share.

any thread: submit, call ---> jobs ---> owner's thread: submit due requests, step, emit events ---> RequestHandle
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from workbench.engine import inputs as intake
from workbench.engine.runner import Runner
from workbench.errors import describe_error
from workbench.request import FinishReason, Request
from workbench.trace.events import Event, Finished
from workbench.widgets.background import FifoLock, RequestHandle, register_stoppable

Result = TypeVar("Result")


@dataclass(eq=False)
class _ServedRequests:
    """Requests served together, known to the owner's thread only.

    `pending` are still to be submitted, `num_unfinished` counts the others; `is_single_text` if one text was given.
    """

    handle: RequestHandle
    pending: deque[Request]
    is_single_text: bool
    start_time: float = 0.0
    output_queue: deque[Event] = field(default_factory=deque)
    num_unfinished: int = 0


class RunnerThread:
    """The thread that owns `runner`; `RunnerThread.attach(runner)` returns the existing one or makes it.

    `runner.stream(...)` of other threads comes here by itself, so cells need not know of it. Everything else that is
    wanted of a running runner goes through `call`.
    """

    def __init__(self, runner: Runner):
        self.runner = runner
        self.exclusive = FifoLock()  # who changes the runner for a while, and wants it back as it was
        self._numbers = itertools.count(1)
        self._bell = threading.Condition()  # guards the two below
        self._jobs: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._serving: list[_ServedRequests] = []  # of the owner's thread alone
        heard = runner.telemetry.listener
        self._listeners = [heard] if heard is not None else []
        runner.set_listener(self._on_event)
        runner.set_owner(self)

    @classmethod
    def attach(cls, runner: Runner) -> RunnerThread:
        """Return the thread that owns `runner`, made at the first call; the kernel's stop button reaches it."""
        if not isinstance(runner.owner, cls):
            register_stoppable(cls(runner))
        assert isinstance(runner.owner, cls)
        return runner.owner

    def new_request_id(self, kind: str) -> str:
        """Return a new request id, unique among all widgets of the runner."""
        return f"{kind}-{next(self._numbers)}"

    def is_current_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def is_other_thread(self) -> bool:
        return self._thread is not None and not self.is_current_thread()

    def submit(self, requests: intake.RequestInput, **sampling: object) -> RequestHandle:
        """Submit `requests` as `Runner.stream` does, and return their handle at once."""
        coming = deque(sorted(self.runner.make_requests(requests, sampling), key=intake.arrival))
        asked = RequestHandle(lambda: self._put(lambda: self._end(serving)))
        serving = _ServedRequests(asked, coming, isinstance(requests, str))
        self._put(lambda: self._begin(serving))
        return asked

    def stream(self, requests: intake.RequestInput, **sampling: object) -> Iterator[Event]:
        return iter(self.submit(requests, **sampling))

    def call(self, function: Callable[[Runner], Result]) -> Result:
        """Return `function(runner)`, run between two of its steps; waits for it and raises its errors here."""
        answer: Future[Result] = Future()
        self._put(lambda: _resolve(answer, function, self.runner))
        return answer.result()

    def stop(self) -> None:
        """Cancel all requests soon."""
        self._put(lambda: [self._end(serving) for serving in list(self._serving)])

    def listen(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Call `listener` with every event of the runner; return a function that ends it.

        It runs in the owner's thread, where time is measured: it should only store the event.
        """
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener) if listener in self._listeners else None

    def _put(self, job: Callable[[], Any]) -> None:
        if self.is_current_thread():
            job()
            return
        with self._bell:
            self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="runner's owner", daemon=True)
                self._thread.start()
            self._bell.notify()

    def _on_event(self, event: Event) -> None:
        for listener in tuple(self._listeners):
            listener(event)

    def _work(self) -> None:
        while True:
            with self._bell:
                idle = None if self._jobs else self._idle()
                if not self._jobs and idle is None:
                    self._thread = None
                    return
                self._bell.wait_for(lambda: self._jobs, idle or 0)
                jobs = [*self._jobs]
                self._jobs.clear()
            try:
                for job in jobs:
                    job()
                self._serve()
            except Exception as error:  # of the runner itself: nothing that was asked can go on
                self._fail_all(describe_error(error))

    def _idle(self) -> float | None:
        """Return seconds until there is work; None where only a new job brings it."""
        if any(each.num_unfinished for each in self._serving):
            return 0
        coming = [each.start_time + intake.arrival(each.pending[0]) for each in self._serving if each.pending]
        return max(0.0, min(coming) - self.runner.clock()) if coming else None

    def _begin(self, each: _ServedRequests) -> None:
        self._serving.append(each)
        each.start_time = self.runner.clock()

    def _serve(self) -> None:
        steps: deque[Event] = deque()
        for each in self._serving:
            while each.pending and each.start_time + intake.arrival(each.pending[0]) <= self.runner.clock():
                request = each.pending.popleft()
                each.num_unfinished += self.runner.submit(
                    request, each.output_queue, each.start_time + intake.arrival(request)
                )
        if self.runner.has_unfinished_requests:
            self.runner.step(steps)
        for each in list(self._serving):
            self._deliver(each, steps)

    def _deliver(self, each: _ServedRequests, steps: deque[Event]) -> None:
        events = [*each.output_queue]
        each.output_queue.clear()
        ends = [event for event in events if isinstance(event, Finished)]
        each.num_unfinished -= len(ends)
        refused = [end.error for end in ends if end.reason == FinishReason.REFUSED]
        done = not each.num_unfinished and not each.pending
        if done:
            self._serving.remove(each)
        each.handle.emit([*events, *steps], done, refused[0] if refused and each.is_single_text else "")

    def _fail_all(self, error: str) -> None:
        for each in list(self._serving):
            try:
                self._end(each, error)
            except Exception:  # the runner cannot even cancel: its handles end all the same
                self._serving.remove(each)
                each.handle.emit([*each.output_queue], True, error)

    def _end(self, each: _ServedRequests, error: str = "") -> None:
        if each not in self._serving:
            return
        each.pending.clear()
        for name in self.runner.tracker.request_ids_of(each.output_queue):
            self.runner.cancel(name)
        self._serving.remove(each)
        each.handle.emit([*each.output_queue], True, error)


def between_steps(runner: Runner, function: Callable[[Runner], Result]) -> Result:
    """Return `function(runner)`, run between two steps of a runner that may be busy for a widget."""
    return RunnerThread.attach(runner).call(function)


def _resolve(future: Future[Any], function: Callable[[Runner], Any], runner: Runner) -> None:
    try:
        future.set_result(function(runner))
    except BaseException as error:
        future.set_exception(error)
