"""Background work: handles of requests and of commands in processes of their own, and the kernel's stop button for
them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from workbench.errors import WorkbenchError
from workbench.machine.environment import child_environment
from workbench.progress import notebook_kernel
from workbench.trace.events import Event


class RequestHandle:
    """Requests submitted together. `events` grows while they are served, with their steps' events.

    Iterating waits for new events; leaving the loop early (an error, the stop button) cancels the requests.
    """

    def __init__(self, cancel: Callable[[], None]):
        """`cancel` cancels the requests soon; the server reports events by `emit`."""
        self.events: list[Event] = []
        self.error = ""  # why it ended, where that was no end of a request
        self._end = cancel
        self._news, self._done = threading.Condition(), False

    @property
    def done(self) -> bool:
        return self._done

    def stop(self) -> None:
        """Cancel the requests soon; each finishes with the reason `cancelled`. Does nothing where all are finished."""
        if not self._done:  # widgets are closed when Python ends, and then no thread can be begun
            self._end()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until all requests are finished, or `seconds`; return whether they are. The stop button cancels them."""
        try:
            with self._news:
                return self._news.wait_for(lambda: self._done, seconds)
        except KeyboardInterrupt:
            self.stop()
            raise

    def emit(self, events: list[Event], done: bool = False, error: str = "") -> None:
        """Append `events`; after `done` there are no more."""
        with self._news:
            self.events += events
            self.error = self.error or error
            self._done = self._done or done
            self._news.notify_all()

    def __iter__(self) -> Iterator[Event]:
        place = 0
        try:
            while True:
                with self._news:
                    while not self._done and len(self.events) == place:
                        self._news.wait()
                    fresh, done = self.events[place:], self._done
                yield from fresh
                place += len(fresh)
                if done and place == len(self.events):
                    break
        finally:
            self.stop()
        if self.error:
            raise WorkbenchError(self.error)


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


class CommandProcess:
    """The command `workbench` with `arguments`.

    `progress_lines` grows line by line (stderr); `on_change` is called, in another thread, with each line and at the
    end, when `returncode` is set (below 0: stopped) and `stdout` is complete.
    """

    def __init__(self, arguments: Sequence[str], on_change: Callable[[], None]):
        self.progress_lines: list[str] = []
        self.returncode: int | None = None
        self.stdout = ""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "workbench", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=child_environment(), start_new_session=True,
        )  # fmt: skip
        self._news = on_change
        register_stoppable(self)
        self._thread = threading.Thread(target=self._read_output, name="a command's listener", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Interrupt the command and all its children as Ctrl-C would; finished measurements are kept."""
        if self.returncode is None:
            os.killpg(self._process.pid, signal.SIGINT)

    def wait(self) -> int:
        """Wait until the command has ended and return its code. The stop button stops it."""
        try:
            self._thread.join()
        except KeyboardInterrupt:
            self.stop()
            raise
        assert self.returncode is not None
        return self.returncode

    def _read_output(self) -> None:
        out, err = self._process.stdout, self._process.stderr
        assert out is not None and err is not None
        whole: list[str] = []
        reader = threading.Thread(target=lambda: whole.append(out.read()))
        reader.start()
        for line in err:
            self.progress_lines.append(line.rstrip())
            self._news()
        reader.join()
        self.stdout = "".join(whole)
        self.returncode = self._process.wait()
        self._news()


class Stoppable(Protocol):
    def stop(self) -> None: ...


_STOPPABLE: weakref.WeakSet[Stoppable] = weakref.WeakSet()


def register_stoppable(target: Stoppable) -> None:
    """Let the stop button stop `target` as long as it is referenced."""
    _STOPPABLE.add(target)
    install_stop_handler()


def install_stop_handler() -> None:
    """Install the handler of the stop button for the time when no cell runs.

    While a cell runs, the button interrupts the cell and all it waits for. The handler can be set only from within a
    cell or a widget's callback: call this before starting work in another thread.
    """
    kernel = notebook_kernel()
    if hasattr(kernel, "saved_sigint_handler"):
        # What ipykernel puts in force when the cell is over; by itself that ignores interrupts until the next.
        kernel.saved_sigint_handler = lambda *_: [each.stop() for each in tuple(_STOPPABLE)]
