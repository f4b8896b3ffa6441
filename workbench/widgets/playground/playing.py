"""Generate one text in the background: load the runner where needed, then serve the request."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from workbench.errors import WorkbenchError, in_words
from workbench.widgets.playground.kept_runners import KeptRunners
from workbench.widgets.playground.played import Played

CANDIDATES = 5  # that are shown of every token, unless the experiment asks for more
TICK = 0.5  # seconds between two words on how long something takes
LEFT = "stopped; what was begun of its runner still goes on, and is kept if it is finished"


class _Stopped(Exception):
    """Stop loading a runner that is no longer wanted."""


class Playing:
    """From `start` on `played` grows until `over`; `news` is called whenever there is something to draw, `ended` once,
    before who waits goes on. `doing` is what it is at, in words. `stop` ends it after the step that is computed; while
    its runner is being made at once, though a piece of that work which cannot be broken off still goes on by itself."""

    def __init__(
        self, experiment: Any, runners: KeptRunners, news: Callable[[], None], ended: Callable[[Playing], None]
    ):
        self.experiment, self.played, self.error = experiment, Played(str), ""
        self._runners, self._news, self._ended = runners, news, ended
        self._asked: Any = None
        self._doing, self._since = "", time.monotonic()
        self._lock = threading.RLock()  # a signal may stop what its own thread is just stopping
        self._stopped, self._over, self._told = threading.Event(), threading.Event(), threading.Event()
        self._left = False  # stopped, and what cannot be broken off goes on

    def start(self) -> None:
        from workbench.widgets.stop_button import reached

        reached(self)
        threading.Thread(target=self._work, name="playground", daemon=True).start()
        threading.Thread(target=self._tick, name="playground's clock", daemon=True).start()

    @property
    def over(self) -> bool:
        return self._over.is_set()

    @property
    def doing(self) -> str:
        if self.over:
            return LEFT if self._left else ""
        if self._stopped.is_set():
            return "stopping, after the step that is being computed"
        if self.played.tokens:
            return "generating"
        return f"{self._doing} ({time.monotonic() - self._since:.0f} s)" if self._doing else ""

    def stop(self) -> None:
        with self._lock:
            self._stopped.set()
            if self._asked is not None and not self.over:
                self._asked.stop()

    def wait(self, seconds: float | None = None) -> bool:
        try:
            return self._told.wait(seconds)
        except KeyboardInterrupt:
            self.stop()
            raise

    def _work(self) -> None:
        try:
            self._play()
        except _Stopped:
            pass
        except Exception as error:  # shown in the widget: no caller could catch it
            self.error = in_words(error)
        self._end()
        self._left = False
        self._news()

    def _end(self) -> None:
        with self._lock:
            if self.over:
                return
            self._over.set()
        try:
            self._ended(self)
        finally:
            self._told.set()

    def _play(self) -> None:
        from workbench.study.workload import requests_of
        from workbench.widgets.live import Live

        runner = self._runners.of(self.experiment, self._now)
        if runner.tokenizer is None:
            raise WorkbenchError(f"model {self.experiment.model.name!r} has no tokenizer: it cannot read a prompt")
        self.played.spell = lambda token: spelled(runner.tokenizer.token_bytes(token))
        (request,) = requests_of(self.experiment, runner.tokenizer, runner.model.spec.vocab)
        self._now("waiting for the first token; what a lane compiles is compiled now")
        live = Live.of(runner)
        sampling = looked_into(request.sampling)
        with self._lock:
            if self._stopped.is_set():
                return
            self._asked = live.ask(replace(request, request_id=live.name("playground"), sampling=sampling))
        for event in self._asked:
            self.played.hear(event)
            self._news()
        self.error = self._asked.error or self.played.error

    def _now(self, doing: str) -> None:
        if self._stopped.is_set():
            raise _Stopped
        self._doing, self._since = doing, time.monotonic()
        self._news()

    def _tick(self) -> None:
        while not self.over and not self._stopped.wait(TICK):
            if not self.played.tokens:
                self._news()
        self._news()
        with self._lock:
            self._left = self._stopped.is_set() and self._asked is None and not self.over
        if self._left:
            self._end()


def looked_into(sampling: Any) -> Any:
    """Return sampling parameters with log probabilities where they can be computed; the tokens stay the same."""
    if sampling.beams:
        return sampling
    return sampling.model_copy(update={"logprobs": max(CANDIDATES, sampling.logprobs or 0)})


def spelled(piece: bytes) -> str:
    """A token's bytes as a reader can tell them apart: a text in quotes, or the bytes where they are none."""
    try:
        return repr(piece.decode())
    except UnicodeDecodeError:
        return " ".join(f"{byte:02X}" for byte in piece)
