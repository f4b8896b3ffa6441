"""Run the jobs that other threads queue in one thread, which owns a front or the coordinator of pools."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import TypeVar

from workbench.errors import WorkbenchError

Result = TypeVar("Result")
ALIVE_SECONDS = 1.0  # interval of checks that the thread is alive


class JobThread(threading.Thread):
    """A thread that runs jobs in order until `close`. Any thread may call its methods.

    Args:
        name: name of the thread.
        closed: returns the error of calls after `close`.
        tick: called after the queued jobs have run, at least once in `wait_seconds()`.
        wait_seconds: returns the maximum wait for a job in seconds; None for no limit.
        failed: called with the exception of a job, SystemExit too.
    """

    def __init__(
        self,
        name: str,
        closed: Callable[[], str],
        tick: Callable[[], object],
        wait_seconds: Callable[[], float | None],
        failed: Callable[[BaseException], object],
    ):
        super().__init__(name=name, daemon=True)
        self.is_closed = False
        self._closed, self._tick, self._wait_seconds, self._failed = closed, tick, wait_seconds, failed
        self._bell = threading.Condition()
        self._jobs: deque[Callable[[], object]] = deque()
        self.start()

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self

    def put(self, job: Callable[[], object]) -> bool:
        """Queue `job` for the thread; return False if the thread is closed and will not run it."""
        with self._bell:
            if self.is_closed:
                return False
            self._jobs.append(job)
            self._bell.notify()
        return True

    def ask(self, function: Callable[[], Result]) -> Result:
        """Run `function()` in the job thread and return its result (WorkbenchError if the thread is closed)."""
        if self.is_current:
            return function()
        answer: Future[Result] = Future()

        def run() -> None:
            try:
                answer.set_result(function())
            except BaseException as error:
                answer.set_exception(error)

        if not self.put(run):
            raise WorkbenchError(self._closed())
        while not answer.done():
            if self.is_closed or not self.is_alive():
                raise WorkbenchError(self._closed())
            wait((answer,), ALIVE_SECONDS)
        return answer.result()

    def close(self, last: Callable[[], object]) -> bool:
        """End the thread after the queued jobs and `last`; return False if it was closed before."""
        with self._bell:
            if self.is_closed:
                return False
            self.is_closed = True
            self._jobs.append(last)
            self._bell.notify()
        return True

    def run(self) -> None:
        while True:
            with self._bell:
                self._bell.wait_for(lambda: self._jobs, self._wait_seconds())
                jobs, self._jobs = self._jobs, deque()
                ends = self.is_closed
            for job in (*jobs, self._tick):
                try:
                    job()
                except BaseException as error:  # nothing but `close` ends the thread
                    with suppress(Exception):
                        self._failed(error)
            if ends:
                return
