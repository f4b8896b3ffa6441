"""One thread owns a runner while widgets are about: they and the cells put what they ask into its queue.

    anywhere: ask, call ---> jobs ---> owner's thread: submit what is due, step, hand events out ---> Asked
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from workbench.engine import intake
from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError, in_words
from workbench.request import FinishReason, Request
from workbench.trace.events import Event, Finished
from workbench.widgets.turns import Turns

Result = TypeVar("Result")
_LIVES: weakref.WeakSet[Live] = weakref.WeakSet()


class Asked:
    """What was asked together. `events` grows while it is served, its steps' included; iterating waits for what comes,
    and leaving the loop early (an error, the stop button) ends the requests."""

    def __init__(self, live: Live, requests: list[Request], lone: bool):
        self.events: list[Event] = []
        self.error = ""  # why it ended, where that was no end of a request
        self._live, self._lone = live, lone
        self._news, self._done = threading.Condition(), False
        # Of the owner's thread alone: what is still to be submitted, since when, where events arrive, ends to come.
        self._coming = deque(sorted(requests, key=intake.due))
        self._began, self._box, self._owed = 0.0, deque[Event](), 0

    @property
    def done(self) -> bool:
        return self._done

    def stop(self) -> None:
        """End the requests soon, wherever they are; each is told as Finished, cancelled. Nothing where all is done."""
        if not self._done:  # widgets are closed when Python ends, and then no thread can be begun
            self._live._put(lambda: self._live._end(self))

    def wait(self, seconds: float | None = None) -> bool:
        """Until all is done, or so many seconds: whether it is. The stop button ends the requests."""
        try:
            with self._news:
                return self._news.wait_for(lambda: self._done, seconds)
        except KeyboardInterrupt:
            self.stop()
            raise

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

    def _tell(self, events: list[Event], done: bool = False, error: str = "") -> None:
        with self._news:
            self.events += events
            self.error = self.error or error
            self._done = self._done or done
            self._news.notify_all()


class Live:
    """Who owns `runner`; `Live.of(runner)` gives the one there is. Work is done in one thread, which lasts as long.

    `runner.stream(...)` of other threads comes here by itself, so cells need not know of it. Whatever else is wanted of
    the runner while it works goes through `call`.
    """

    def __init__(self, runner: Runner):
        self.runner = runner
        self.trials = Turns()  # who changes the runner for a while, and wants it back as it was
        self._numbers = itertools.count(1)
        self._bell = threading.Condition()  # guards the two below
        self._jobs: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._asked: list[Asked] = []  # of the owner's thread alone
        heard = runner.instruments.listener
        self._listeners = [heard] if heard is not None else []
        runner.instruments.listener = self._heard
        runner.owner = self

    @classmethod
    def of(cls, runner: Runner) -> Live:
        """Who owns `runner`: made for the first who asks for it; the stop button reaches it."""
        if not isinstance(runner.owner, cls):
            _LIVES.add(cls(runner))
            hear_stop_button()
        assert isinstance(runner.owner, cls)
        return runner.owner

    def name(self, kind: str) -> str:
        """A request id for what a view asks of itself: none has it yet, however many views look at the runner."""
        return f"{kind}-{next(self._numbers)}"

    def here(self) -> bool:
        return threading.current_thread() is self._thread

    def elsewhere(self) -> bool:
        return self._thread is not None and not self.here()

    def ask(self, requests: intake.Asked, **sampling: object) -> Asked:
        """Have `requests` served, as in `Runner.stream`, and return at once."""
        asked = Asked(self, self.runner.read(requests, sampling), isinstance(requests, str))
        self._put(lambda: self._begin(asked))
        return asked

    def stream(self, requests: intake.Asked, **sampling: object) -> Iterator[Event]:
        return iter(self.ask(requests, **sampling))

    def call(self, work: Callable[[Runner], Result]) -> Result:
        """What `work` makes of the runner, between two of its steps; waits for it. Errors come out here."""
        answer: Future[Result] = Future()
        self._put(lambda: _answer(answer, work, self.runner))
        return answer.result()

    def stop(self) -> None:
        """End everything that was asked, soon."""
        self._put(lambda: [self._end(asked) for asked in list(self._asked)])

    def listen(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """`listener` hears every event of the runner, in the owner's thread, where time is measured: it should only
        keep it. Returns what ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener) if listener in self._listeners else None

    def _put(self, job: Callable[[], Any]) -> None:
        if self.here():
            job()
            return
        with self._bell:
            self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="runner's owner", daemon=True)
                self._thread.start()
            self._bell.notify()

    def _heard(self, event: Event) -> None:
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
            for job in jobs:
                job()
            self._serve()

    def _idle(self) -> float | None:
        """Seconds until there is something to do; None where only the queue can bring it."""
        if any(asked._owed for asked in self._asked):
            return 0
        coming = [asked._began + intake.due(asked._coming[0]) for asked in self._asked if asked._coming]
        return max(0.0, min(coming) - self.runner.clock()) if coming else None

    def _begin(self, asked: Asked) -> None:
        asked._began = self.runner.clock()
        self._asked.append(asked)

    def _serve(self) -> None:
        steps: deque[Event] = deque()
        try:
            for asked in self._asked:
                while asked._coming and asked._began + intake.due(asked._coming[0]) <= self.runner.clock():
                    request = asked._coming.popleft()
                    asked._owed += self.runner.submit(request, asked._box, asked._began + request.arrival)
            if self.runner.busy:
                self.runner.step(steps)
        except Exception as error:  # of the runner itself: nothing that was asked can go on
            for asked in list(self._asked):
                self._end(asked, in_words(error))
            return
        for asked in list(self._asked):
            self._deliver(asked, steps)

    def _deliver(self, asked: Asked, steps: deque[Event]) -> None:
        events = [*asked._box]
        asked._box.clear()
        ends = [event for event in events if isinstance(event, Finished)]
        asked._owed -= len(ends)
        refused = [end.error for end in ends if end.reason == FinishReason.REFUSED]
        done = not asked._owed and not asked._coming
        if done:
            self._asked.remove(asked)
        asked._tell([*events, *steps], done, refused[0] if refused and asked._lone else "")

    def _end(self, asked: Asked, error: str = "") -> None:
        if asked not in self._asked:
            return
        asked._coming.clear()
        for name in self.runner.served.of(asked._box):
            self.runner.cancel(name)
        self._asked.remove(asked)
        asked._tell([*asked._box], True, error)


def hear_stop_button() -> None:
    """Under Jupyter, an interrupt while no cell runs ends what the owners are at. (While one runs it ends the cell, and
    with it what the cell waits for.) Only where a cell, or a widget's answer, is at it can this be set: who has runners
    made in another thread calls it before."""
    ipython = sys.modules.get("IPython")
    kernel: Any = getattr(ipython.get_ipython() if ipython is not None else None, "kernel", None)
    if hasattr(kernel, "saved_sigint_handler"):
        # What ipykernel puts in force when the cell is over; by itself that ignores interrupts until the next.
        kernel.saved_sigint_handler = lambda *_: [each.stop() for each in _LIVES]


def _answer(answer: Future[Any], work: Callable[[Runner], Any], runner: Runner) -> None:
    try:
        answer.set_result(work(runner))
    except BaseException as error:
        answer.set_exception(error)
