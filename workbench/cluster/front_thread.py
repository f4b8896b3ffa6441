"""Run a front in a thread of its own: jobs that other threads give it, and arrivals when they are due."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import TypeVar

from workbench.cluster.front import Front
from workbench.cluster.launcher import CLOSED
from workbench.errors import WorkbenchError, describe_error

Result = TypeVar("Result")
CLOSE_SECONDS = 10.0
ALIVE_SECONDS = 1.0  # between two looks whether the thread goes on


class FrontThread:
    """The thread to which a front belongs, until `close`. Every method is for any thread."""

    def __init__(self, front: Front):
        self.front = front
        self.is_closed = False
        self._bell = threading.Condition()
        self._jobs: deque[Callable[[], object]] = deque()
        self._thread = threading.Thread(target=self._work, name="cluster's front", daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def put(self, job: Callable[[], object]) -> bool:
        """Run `job` soon, after what the thread is at; return False where it will not be run, since it was closed."""
        with self._bell:
            if self.is_closed:
                return False
            self._jobs.append(job)
            self._bell.notify()
        return True

    def ask(self, function: Callable[[], Result]) -> Result:
        """Return `function()` (WorkbenchError where the thread was closed)."""
        if self.is_current:
            return function()
        answer: Future[Result] = Future()

        def run() -> None:
            try:
                answer.set_result(function())
            except BaseException as error:
                answer.set_exception(error)

        if not self.put(run):
            raise WorkbenchError(CLOSED)
        while not answer.done():
            if self.is_closed or not self._thread.is_alive():
                raise WorkbenchError(CLOSED)
            wait((answer,), ALIVE_SECONDS)
        return answer.result()

    def close(self) -> bool:
        """End all requests of the front and the thread; return False where that was done before."""
        with self._bell:
            if self.is_closed:
                return False
            self.is_closed = True
            self._jobs.append(lambda: self.front.end_all(CLOSED))
            self._bell.notify()
        if not self.is_current:
            self._thread.join(CLOSE_SECONDS)
        return True

    def _work(self) -> None:
        while True:
            with self._bell:
                coming = self.front.submissions.next_arrival()
                seconds = None if coming is None else max(0.0, coming - self.front.clock())
                self._bell.wait_for(lambda: self._jobs, seconds)
                jobs, self._jobs = self._jobs, deque()
                ends = self.is_closed
            for job in (*jobs, self.front.arrive):
                try:
                    job()
                except Exception as error:  # a fault of the front's own: nothing that it has can go on
                    with suppress(Exception):
                        self.front.end_all(f"the front failed: {describe_error(error)}")
            if ends:
                return
