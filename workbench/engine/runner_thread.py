"""Run a runner in one thread, which the server, widgets and notebook cells share.

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
# Time that an idle thread is kept: its OpenMP pool ends with it, and the next thread would have to create its own.
LINGER_SECONDS = 1.0
CLOSE_SECONDS = 10.0  # maximum wait for a running step at interpreter shutdown
CLOSED = "the runner's thread was closed, since Python ends"

HandOut = Callable[[], object]  # a job's last part, run when it no longer uses the runner


class EventSink(Protocol):
    """The receiver of the events of requests that were submitted together; it is called in the runner's thread."""

    def emit(self, events: list[Event], done: bool = False, error: str = "") -> None:
        """Receive events, including those of steps; after a call with `done` no more follow. `error` is the error that
        ended all requests.
        """
        ...


@dataclass(eq=False)
class _ServedRequests:
    """Requests submitted together; accessed only by the owner's thread.

    `pending` requests are not submitted yet, `num_unfinished` counts submitted ones; `is_single`: a single text or
    conversation was given.
    """

    handle: EventSink
    pending: deque[Request]
    is_single: bool
    start_time: float | None = None  # seconds on the runner's clock; None before service starts
    output_queue: deque[Event] = field(default_factory=deque)
    num_unfinished: int = 0

    def arrival_time(self, request: Request) -> float:
        """Return the arrival time of `request` on the runner's clock."""
        assert self.start_time is not None
        return self.start_time + intake.arrival(request)


class FifoLock:
    """A lock that threads get in the order of their calls of `enqueue`. Call `enqueue` first, then `acquire` in any
    thread, and always `release`, also after a cancelled wait.
    """

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

        `cancelled` is checked again at each `notify`.
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
    """The thread that owns `runner`; `RunnerThread.attach(runner)` returns the existing one or creates it.

    `runner.stream(...)` in other threads uses it automatically, so cells need not know about it. All other access to a
    running runner goes through `call`.
    """

    def __init__(self, runner: Runner):
        self.runner = runner
        self.exclusive = FifoLock()  # users that change the runner temporarily and restore it afterwards
        self._numbers = itertools.count(1)
        self._bell = threading.Condition()  # guards the next two attributes
        self._jobs: deque[Callable[[], HandOut | None]] = deque()
        self._thread: threading.Thread | None = None
        self._is_closed = False  # interpreter shutdown has started
        self._uses_runner = False  # while the thread is in a job or a step
        self._turn_began: float | None = None  # while jobs or a step are running
        self._serving: list[_ServedRequests] = []  # only accessed by the owner's thread
        listener = runner.telemetry.listener
        self._listeners = [listener] if listener is not None else []
        self._after_delivery: list[Callable[[], None]] = []
        runner.set_listener(self._on_event)
        runner.set_owner(self)
        _OPEN.add(self)

    @classmethod
    def attach(cls, runner: Runner) -> RunnerThread:
        """Return the thread that owns `runner`, created at the first call; Jupyter's stop button interrupts it."""
        if not isinstance(runner.owner, cls):
            register_stoppable(cls(runner))
        assert isinstance(runner.owner, cls)
        return runner.owner

    def new_request_id(self, kind: str) -> str:
        """Return a new request id, which no other widget of the runner has."""
        return f"{kind}-{next(self._numbers)}"

    def is_current_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def busy_seconds(self) -> float:
        """Return the number of seconds since the current step began, including the jobs before it; 0 if no step is
        running.
        """
        began = self._turn_began
        return 0.0 if began is None else time.perf_counter() - began

    def is_other_thread(self) -> bool:
        """Return whether the owner's thread is busy and differs from the current thread.

        It stops being busy when the end of the last request, or the result of the last call, is delivered: then the
        caller may use the runner directly.
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
        """Submit `requests` whose events go to `sink`; return a function that cancels them soon, callable from any
        thread.

        Args:
            sink: receiver of their events.
            requests: the requests.
            is_single: whether a refused request is reported to the sink as an error.
            start_time: start of arrival times, in seconds on the runner's clock; default: now. It is earlier for a
                client that sent its request during a step.
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
        """Run `function(runner)` between two steps and return its result. The call blocks, and raises the function's
        errors.
        """
        return self.submit_call(function).result()

    def submit_call(self, function: Callable[[Runner], Result]) -> Future[Result]:
        """Return the future of `function(runner)`, which runs between two steps unless the future is cancelled
        before.
        """
        answer: Future[Result] = Future()
        if not self._put(lambda: self._resolve(answer, function)):
            raise WorkbenchError(CLOSED)
        return answer

    def run_soon(self, function: Callable[[], object]) -> None:
        """Schedule `function` to run in the owner's thread between two steps, and return at once; it must not raise."""

        def job() -> None:
            function()

        self._put(job)

    def stop(self) -> None:
        """Cancel all requests soon."""
        self._put(self._end_all)

    def close(self) -> None:
        """Cancel all requests and end the thread. This is for interpreter shutdown, which must not happen during a
        step.

        If Python kills a thread within C++ code, the process ends by `std::terminate`; no thread can be started at that
        time.
        """
        with self._bell:
            thread, self._is_closed = self._thread, True
            if thread is None or not thread.is_alive() or thread is threading.current_thread():
                return
            self._jobs.append(self._end_all)
            self._bell.notify()
        thread.join(CLOSE_SECONDS)

    def listen(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Call `listener` with every event of the runner; return a function that removes it.

        It runs in the owner's thread, which is timed, so it should only store the event.
        """
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener) if listener in self._listeners else None

    def after_delivery(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` after the events of a step, or of a request's end, are delivered to their sinks; return a
        function that removes it.

        It runs in the owner's thread. A sink that wakes another thread does so here, once for all events.
        """
        self._after_delivery.append(callback)
        return lambda: self._after_delivery.remove(callback) if callback in self._after_delivery else None

    def _put(self, job: Callable[[], HandOut | None]) -> bool:
        """Run `job` in the owner's thread; return False if it will not run because of interpreter shutdown."""
        if self.is_current_thread():  # called within a job or step, which continues to use the runner
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
            except BaseException as error:  # an error of the runner or its thread ends all requests
                self._fail_all(describe_error(error))
                self._notify_delivered()

    def _turn(self) -> bool:
        """Run the waiting jobs and one step; return False if there is no work, which ends the thread."""
        self._turn_began = None
        with self._bell:
            idle = 0 if self._jobs else self._idle()
            self._bell.wait_for(lambda: self._jobs, LINGER_SECONDS if idle is None else idle)
            if not self._jobs and idle is None:
                self._thread = None
                return False
        self._turn_began = time.perf_counter()
        while self._jobs:  # if one raises, the others run in the next turn
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
        """Return the seconds until there is work; None if only a new job can bring work."""
        if any(each.num_unfinished for each in self._serving):
            return 0
        coming = [each.arrival_time(each.pending[0]) for each in self._serving if each.pending]
        return max(0.0, min(coming) - self.runner.clock()) if coming else None

    def _begin(self, each: _ServedRequests) -> None:
        self._serving.append(each)
        if each.start_time is None:
            each.start_time = self.runner.clock()

    def _serve(self) -> None:
        if not self._serving:  # another thread owns the runner and may have requests in it
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
            except Exception:  # even if the runner fails to cancel, its handles end
                self._serving.remove(each)
                hand_out = partial(each.handle.emit, [*each.output_queue], True, error)
            if hand_out is not None:
                hand_out()

    def _end_all(self) -> HandOut:
        ended = [self._end(serving) for serving in list(self._serving)]
        return lambda: [hand_out() for hand_out in ended if hand_out is not None]

    def _end(self, each: _ServedRequests, error: str = "") -> HandOut | None:
        """Cancel `each` and return a function that delivers its end; None if it has already ended."""
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
    """Run `function(runner)` between two steps of a runner that may be busy, and return its result."""
    return RunnerThread.attach(runner).call(function)
