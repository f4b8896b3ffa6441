"""Run a runner in one thread that the server, widgets and notebook cells share.

any thread: submit, call ---> jobs ---> owner's thread: submit due requests, step, emit events ---> RequestHandle
"""

from __future__ import annotations

import atexit
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

from workbench.engine import inputs as intake
from workbench.engine.request_handle import RequestHandle
from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError, describe_error
from workbench.request import FinishReason, Request
from workbench.stop_button import register_stoppable
from workbench.trace.events import Event, Finished

Result = TypeVar("Result")
# A thread that ends takes its pool of OpenMP threads along: the next would begin beside them, and make its own.
LINGER_SECONDS = 1.0
CLOSE_SECONDS = 10.0  # the longest wait for a step under way when Python ends
CLOSED = "the runner's thread was closed, since Python ends"

HandOut = Callable[[], object]  # what a job leaves to be done once it uses the runner no more: its reader may use it


class EventSink(Protocol):
    """The receiver of the events of requests that were submitted together, in the thread that runs them."""

    def emit(self, events: list[Event], done: bool = False, error: str = "") -> None:
        """Take events, with those of the steps; after `done` there are no more. `error`: why all of them ended."""
        ...


@dataclass(eq=False)
class _ServedRequests:
    """Requests served together, known to the owner's thread only.

    `pending` are still to be submitted, `num_unfinished` counts the others; `is_single` if a lone text or conversation
    was given.
    """

    handle: EventSink
    pending: deque[Request]
    is_single: bool
    start_time: float | None = None  # seconds on the runner's clock; None until they are served
    output_queue: deque[Event] = field(default_factory=deque)
    num_unfinished: int = 0

    def arrival_time(self, request: Request) -> float:
        """Return when `request` arrives, on the runner's clock."""
        assert self.start_time is not None
        return self.start_time + intake.arrival(request)


class FifoLock:
    """Fair lock: `enqueue` at once, `acquire` in a thread of one's own, `release` in any case, also after giving up."""

    def __init__(self) -> None:
        self._bell = threading.Condition()
        self._line: deque[object] = deque()

    def enqueue(self, owner: object) -> None:
        with self._bell:
            self._line.append(owner)

    def is_first(self, owner: object) -> bool:
        with self._bell:
            return bool(self._line) and self._line[0] is owner

    def acquire(self, owner: object, cancelled: Callable[[], bool]) -> bool:
        """Wait until the lock is held or `cancelled()`; return whether it is held.

        `cancelled` is tested again at each `notify`.
        """
        with self._bell:
            self._bell.wait_for(lambda: cancelled() or self._line[0] is owner)
            return not cancelled()

    def notify(self) -> None:
        with self._bell:
            self._bell.notify_all()

    def release(self, owner: object) -> None:
        with self._bell:
            self._line.remove(owner)
            self._bell.notify_all()


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
        self._jobs: deque[Callable[[], HandOut | None]] = deque()
        self._thread: threading.Thread | None = None
        self._is_closed = False  # Python ends
        self._uses_runner = False  # while the thread is in a job or a step
        self._turn_began: float | None = None  # while jobs or a step are under way
        self._serving: list[_ServedRequests] = []  # read and written by the owner's thread alone
        listener = runner.telemetry.listener
        self._listeners = [listener] if listener is not None else []
        self._after_delivery: list[Callable[[], None]] = []
        runner.set_listener(self._on_event)
        runner.set_owner(self)
        _OPEN.add(self)

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

    def busy_seconds(self) -> float:
        """Return the seconds that the present step, with the jobs before it, has lasted; 0 while there is none."""
        began = self._turn_began
        return 0.0 if began is None else time.perf_counter() - began

    def is_other_thread(self) -> bool:
        """Return whether the owner's thread is at work and is not this one.

        It is not from the moment on at which the last request's end, or the result of the last call, is handed out:
        then the caller may use the runner itself.
        """
        if self._thread is None or self.is_current_thread():
            return False
        with self._bell:
            return bool(self._jobs) or self._uses_runner or bool(self._serving)

    def submit(self, requests: intake.RequestInput, **sampling: object) -> RequestHandle:
        """Submit `requests` as `Runner.stream` does, and return their handle at once."""
        handle = RequestHandle(lambda: cancel())
        made = self.runner.make_requests(requests, sampling)
        cancel = self.submit_to(handle, made, intake.is_single(requests))
        return handle

    def submit_to(
        self, sink: EventSink, requests: Iterable[Request], is_single: bool = False, start_time: float | None = None
    ) -> Callable[[], None]:
        """Submit `requests`, whose events go to `sink`; return a function that cancels them soon, from any thread.

        Args:
            sink: receives their events.
            requests: the requests.
            is_single: whether the sink is given the error of a request that is refused.
            start_time: seconds on the runner's clock from which arrivals are counted; the present unless given. Of a
                client that asked while a step was computed it is earlier.
        """
        serving = _ServedRequests(sink, deque(sorted(requests, key=intake.arrival)), is_single, start_time)
        if not self._put(lambda: self._begin(serving)):
            raise WorkbenchError(CLOSED)

        def cancel() -> None:
            self._put(lambda: self._end(serving))

        return cancel

    def stream(self, requests: intake.RequestInput, **sampling: object) -> Iterator[Event]:
        return iter(self.submit(requests, **sampling))

    def call(self, function: Callable[[Runner], Result]) -> Result:
        """Return `function(runner)`, run between two of its steps; waits for it and raises its errors here."""
        return self.submit_call(function).result()

    def submit_call(self, function: Callable[[Runner], Result]) -> Future[Result]:
        """Return the future of `function(runner)`, run between two of its steps unless it is cancelled before."""
        answer: Future[Result] = Future()
        if not self._put(lambda: self._resolve(answer, function)):
            raise WorkbenchError(CLOSED)
        return answer

    def run_soon(self, function: Callable[[], object]) -> None:
        """Run `function` in the owner's thread, between two steps, and do not wait for it; it must not raise."""

        def job() -> None:
            function()

        self._put(job)

    def stop(self) -> None:
        """Cancel all requests soon."""
        self._put(self._end_all)

    def close(self) -> None:
        """Cancel all requests and end the thread; for the end of Python, which must not find it in a step.

        A thread that Python ends within C++ code ends the process by `std::terminate`, and none can be begun then."""
        with self._bell:
            thread, self._is_closed = self._thread, True
            if thread is None or not thread.is_alive() or thread is threading.current_thread():
                return
            self._jobs.append(self._end_all)
            self._bell.notify()
        thread.join(CLOSE_SECONDS)

    def listen(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Call `listener` with every event of the runner; return a function that ends it.

        It runs in the owner's thread, where time is measured: it should only store the event.
        """
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener) if listener in self._listeners else None

    def after_delivery(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` when the events of a step or of an end are with their sinks; return a function that ends it.

        It runs in the owner's thread: a sink that wakes another thread does so here, once for all.
        """
        self._after_delivery.append(callback)
        return lambda: self._after_delivery.remove(callback) if callback in self._after_delivery else None

    def _put(self, job: Callable[[], HandOut | None]) -> bool:
        """Run `job` in the owner's thread; return False where it will not be run, since Python ends."""
        if self.is_current_thread():  # within a job or a step, which goes on with the runner
            if (hand_out := job()) is not None:
                hand_out()
            return True
        with self._bell:
            if self._is_closed:
                return False
            self._jobs.append(job)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, name="runner's owner", daemon=True)
                self._thread.start()
            self._bell.notify()
        return True

    def _on_event(self, event: Event) -> None:
        for listener in tuple(self._listeners):
            listener(event)

    def _work(self) -> None:
        while True:
            try:
                if not self._turn():
                    return
            except BaseException as error:  # a fault of the runner or its thread ends all requests
                self._fail_all(describe_error(error))
                self._notify_delivered()

    def _turn(self) -> bool:
        """Do the jobs that wait and run one step; return False, and end the thread, where there is nothing to do."""
        self._turn_began = None
        with self._bell:
            idle = 0 if self._jobs else self._idle()
            self._bell.wait_for(lambda: self._jobs, LINGER_SECONDS if idle is None else idle)
            if not self._jobs and idle is None:
                self._thread = None
                return False
        self._turn_began = time.perf_counter()
        while self._jobs:  # one that raises leaves the others to the next turn
            with self._using_runner():
                hand_out = self._jobs.popleft()()
            if hand_out is not None:
                hand_out()
        self._serve()
        self._notify_delivered()
        return not self._is_closed

    def _notify_delivered(self) -> None:
        for callback in tuple(self._after_delivery):
            callback()

    @contextmanager
    def _using_runner(self) -> Iterator[None]:
        self._uses_runner = True
        try:
            yield
        finally:
            self._uses_runner = False

    def _resolve(self, future: Future[Result], function: Callable[[Runner], Result]) -> HandOut | None:
        if not future.set_running_or_notify_cancel():
            return None
        try:
            result = function(self.runner)
        except BaseException as error:
            return partial(future.set_exception, error)
        return lambda: future.set_result(result)

    def _idle(self) -> float | None:
        """Return seconds until there is work; None where only a new job brings it."""
        if any(each.num_unfinished for each in self._serving):
            return 0
        coming = [each.arrival_time(each.pending[0]) for each in self._serving if each.pending]
        return max(0.0, min(coming) - self.runner.clock()) if coming else None

    def _begin(self, each: _ServedRequests) -> None:
        self._serving.append(each)
        if each.start_time is None:
            each.start_time = self.runner.clock()

    def _serve(self) -> None:
        if not self._serving:  # the runner is another thread's, which may have requests in it
            return
        steps: deque[Event] = deque()
        with self._using_runner():
            for each in self._serving:
                while each.pending and each.arrival_time(each.pending[0]) <= self.runner.clock():
                    request = each.pending.popleft()
                    each.num_unfinished += self.runner.submit(request, each.output_queue, each.arrival_time(request))
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
        each.handle.emit([*events, *steps], done, refused[0] if refused and each.is_single else "")

    def _fail_all(self, error: str) -> None:
        for each in list(self._serving):
            try:
                hand_out = self._end(each, error)
            except Exception:  # the runner cannot even cancel: its handles end all the same
                self._serving.remove(each)
                hand_out = partial(each.handle.emit, [*each.output_queue], True, error)
            if hand_out is not None:
                hand_out()

    def _end_all(self) -> HandOut:
        ended = [self._end(serving) for serving in list(self._serving)]
        return lambda: [hand_out() for hand_out in ended if hand_out is not None]

    def _end(self, each: _ServedRequests, error: str = "") -> HandOut | None:
        """Cancel `each` and return what hands out its end; None where it has ended."""
        if each not in self._serving:
            return None
        each.pending.clear()
        for name in self.runner.tracker.request_ids_of(each.output_queue):
            self.runner.cancel(name)
        self._serving.remove(each)
        return partial(each.handle.emit, [*each.output_queue], True, error)


_OPEN: weakref.WeakSet[RunnerThread] = weakref.WeakSet()


@atexit.register
def _close_threads() -> None:
    for each in tuple(_OPEN):
        each.close()


def between_steps(runner: Runner, function: Callable[[Runner], Result]) -> Result:
    """Return `function(runner)`, run between two steps of a runner that may be busy for others."""
    return RunnerThread.attach(runner).call(function)
