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

from workbench.engine import intake
from workbench.engine.runner import Runner
from workbench.errors import in_words
from workbench.request import FinishReason, Request
from workbench.trace.events import Event, Finished
from workbench.widgets.asked import Asked
from workbench.widgets.stop_button import reached
from workbench.widgets.turns import Turns

Result = TypeVar("Result")


@dataclass(eq=False)
class _Serving:
    """Requests served together, known to the owner's thread only.

    `pending` are still to be submitted, `num_unfinished` counts the others; `is_single_text` if one text was given.
    """

    asked: Asked
    coming: deque[Request]
    lone: bool
    began: float = 0.0
    box: deque[Event] = field(default_factory=deque)
    owed: int = 0


class Live:
    """The thread that owns `runner`; `RunnerThread.attach(runner)` returns the existing one or makes it.

    `runner.stream(...)` of other threads comes here by itself, so cells need not know of it. Everything else that is
    wanted of a running runner goes through `call`.
    """

    def __init__(self, runner: Runner):
        self.runner = runner
        self.trials = Turns()  # who changes the runner for a while, and wants it back as it was
        self._numbers = itertools.count(1)
        self._bell = threading.Condition()  # guards the two below
        self._jobs: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._serving: list[_Serving] = []  # of the owner's thread alone
        heard = runner.instruments.listener
        self._listeners = [heard] if heard is not None else []
        runner.instruments.listener = self._heard
        runner.owner = self

    @classmethod
    def of(cls, runner: Runner) -> Live:
        """Return the thread that owns `runner`, made at the first call; the kernel's stop button reaches it."""
        if not isinstance(runner.owner, cls):
            reached(cls(runner))
        assert isinstance(runner.owner, cls)
        return runner.owner

    def name(self, kind: str) -> str:
        """Return a new request id, unique among all widgets of the runner."""
        return f"{kind}-{next(self._numbers)}"

    def here(self) -> bool:
        return threading.current_thread() is self._thread

    def elsewhere(self) -> bool:
        return self._thread is not None and not self.here()

    def ask(self, requests: intake.Asked, **sampling: object) -> Asked:
        """Submit `requests` as `Runner.stream` does, and return their handle at once."""
        coming = deque(sorted(self.runner.read(requests, sampling), key=intake.due))
        asked = Asked(lambda: self._put(lambda: self._end(serving)))
        serving = _Serving(asked, coming, isinstance(requests, str))
        self._put(lambda: self._begin(serving))
        return asked

    def stream(self, requests: intake.Asked, **sampling: object) -> Iterator[Event]:
        return iter(self.ask(requests, **sampling))

    def call(self, work: Callable[[Runner], Result]) -> Result:
        """Return `function(runner)`, run between two of its steps; waits for it and raises its errors here."""
        answer: Future[Result] = Future()
        self._put(lambda: _answer(answer, work, self.runner))
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
            try:
                for job in jobs:
                    job()
                self._serve()
            except Exception as error:  # of the runner itself: nothing that was asked can go on
                self._give_up(in_words(error))

    def _idle(self) -> float | None:
        """Return seconds until there is work; None where only a new job brings it."""
        if any(each.owed for each in self._serving):
            return 0
        coming = [each.began + intake.due(each.coming[0]) for each in self._serving if each.coming]
        return max(0.0, min(coming) - self.runner.clock()) if coming else None

    def _begin(self, each: _Serving) -> None:
        self._serving.append(each)
        each.began = self.runner.clock()

    def _serve(self) -> None:
        steps: deque[Event] = deque()
        for each in self._serving:
            while each.coming and each.began + intake.due(each.coming[0]) <= self.runner.clock():
                request = each.coming.popleft()
                each.owed += self.runner.submit(request, each.box, each.began + intake.due(request))
        if self.runner.busy:
            self.runner.step(steps)
        for each in list(self._serving):
            self._deliver(each, steps)

    def _deliver(self, each: _Serving, steps: deque[Event]) -> None:
        events = [*each.box]
        each.box.clear()
        ends = [event for event in events if isinstance(event, Finished)]
        each.owed -= len(ends)
        refused = [end.error for end in ends if end.reason == FinishReason.REFUSED]
        done = not each.owed and not each.coming
        if done:
            self._serving.remove(each)
        each.asked.tell([*events, *steps], done, refused[0] if refused and each.lone else "")

    def _give_up(self, error: str) -> None:
        for each in list(self._serving):
            try:
                self._end(each, error)
            except Exception:  # the runner cannot even cancel: its handles end all the same
                self._serving.remove(each)
                each.asked.tell([*each.box], True, error)

    def _end(self, each: _Serving, error: str = "") -> None:
        if each not in self._serving:
            return
        each.coming.clear()
        for name in self.runner.served.of(each.box):
            self.runner.cancel(name)
        self._serving.remove(each)
        each.asked.tell([*each.box], True, error)


def _answer(answer: Future[Any], work: Callable[[Runner], Any], runner: Runner) -> None:
    try:
        answer.set_result(work(runner))
    except BaseException as error:
        answer.set_exception(error)
