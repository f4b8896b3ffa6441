"""Run work in its own thread: the one way in which widgets work in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Self

from workbench.errors import describe_error
from workbench.stop_button import register_stoppable
from workbench.waiting import wait_and_serve


class Job:
    """A thread that calls `work`: `error` says why it failed, `stop` ends it soon, `wait` waits for its end.

    The kernel's stop button stops the job. A cell that waits for it serves the notebook's widgets meanwhile.

    Args:
        work: called with the job. It should return early once `stopped` is set; its exception is described in `error`.
        on_end: called once with the job, after `work` and before `wait` returns.
        on_stop: called in the thread that calls `stop`; it ends the wait that `work` is in.
        name: name of the thread.
    """

    def __init__(
        self, work: Callable[[Job], object], on_end: Callable[[Job], object] = lambda job: None,
        on_stop: Callable[[], object] = lambda: None, name: str = "job",
    ):  # fmt: skip
        self.error = ""
        self._work, self._on_end, self._on_stop = work, on_end, on_stop
        self._stopped, self._ended = threading.Event(), threading.Event()
        self._lock = threading.RLock()  # reentrant: a signal may call `stop` in a thread that is within `stop`
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> Self:
        register_stoppable(self)
        self._thread.start()
        return self

    @property
    def stopped(self) -> bool:
        return self._stopped.is_set()

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    def stop(self) -> None:
        with self._lock:
            self._stopped.set()
            if not self.done:
                self._on_stop()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the end, at most `seconds`; return whether the job has ended. An interrupt stops the job."""
        try:
            return wait_and_serve(self._ended.wait, seconds)
        except KeyboardInterrupt:
            self.stop()
            raise

    def _run(self) -> None:
        try:
            try:
                self._work(self)
            except Exception as error:  # shown in the widget: no caller could catch it
                self.error = describe_error(error)
            self._on_end(self)
        finally:
            self._ended.set()
