"""Generate one text in the background: load the runner where needed, then serve the request."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from workbench.errors import WorkbenchError, describe_error
from workbench.widgets.playground.kept_runners import RunnerCache
from workbench.widgets.playground.played import PlayedRequest

NUM_LOGPROBS = 5  # that are shown of every token, unless the experiment asks for more
STATUS_INTERVAL_SECONDS = 0.5  # seconds between two words on how long something takes
STILL_LOADING = "stopped; what was begun of its runner still goes on, and is kept if it is finished"


class _Stopped(Exception):
    """Stop loading a runner that is no longer wanted."""


class BackgroundGeneration:
    """From `start` on `played` grows until `over`; `news` is called whenever there is something to draw, `ended` once,
    before who waits goes on. `doing` is what it is at, in words. `stop` ends it after the step that is computed; while
    its runner is being made at once, though a piece of that work which cannot be broken off still goes on by itself."""

    def __init__(
        self, experiment: Any, runners: RunnerCache, on_change: Callable[[], None], on_end: Callable[[BackgroundGeneration], None]
    ):
        self.experiment, self.played, self.error = experiment, PlayedRequest(str), ""
        self._runners, self._news, self._ended = runners, on_change, on_end
        self._handle: Any = None
        self._status, self._since = "", time.monotonic()
        self._lock = threading.RLock()  # a signal may stop what its own thread is just stopping
        self._stopped, self._done, self._reported = threading.Event(), threading.Event(), threading.Event()
        self._left = False  # stopped, and what cannot be broken off goes on

    def start(self) -> None:
        from workbench.widgets.stop_button import register_stoppable

        register_stoppable(self)
        threading.Thread(target=self._work, name="playground", daemon=True).start()
        threading.Thread(target=self._tick, name="playground's clock", daemon=True).start()

    @property
    def done(self) -> bool:
        return self._done.is_set()

    @property
    def status(self) -> str:
        if self.done:
            return STILL_LOADING if self._left else ""
        if self._stopped.is_set():
            return "stopping, after the step that is being computed"
        if self.played.num_tokens:
            return "generating"
        return f"{self._status} ({time.monotonic() - self._since:.0f} s)" if self._status else ""

    def stop(self) -> None:
        with self._lock:
            self._stopped.set()
            if self._handle is not None and not self.done:
                self._handle.stop()

    def wait(self, seconds: float | None = None) -> bool:
        try:
            return self._reported.wait(seconds)
        except KeyboardInterrupt:
            self.stop()
            raise

    def _work(self) -> None:
        try:
            self._generate()
        except _Stopped:
            pass
        except Exception as error:  # shown in the widget: no caller could catch it
            self.error = describe_error(error)
        self._end()
        self._left = False
        self._news()

    def _end(self) -> None:
        with self._lock:
            if self.done:
                return
            self._done.set()
        try:
            self._ended(self)
        finally:
            self._reported.set()

    def _generate(self) -> None:
        from workbench.study.workload import requests_of
        from workbench.widgets.live import RunnerThread

        runner = self._runners.get(self.experiment, self._set_status)
        if runner.tokenizer is None:
            raise WorkbenchError(f"model {self.experiment.model.name!r} has no tokenizer: it cannot read a prompt")
        self.played.token_text = lambda token: format_token_bytes(runner.tokenizer.token_bytes(token))
        (request,) = requests_of(self.experiment, runner.tokenizer, runner.model.spec.vocab)
        self._set_status("waiting for the first token; what a backend compiles is compiled now")
        live = RunnerThread.attach(runner)
        sampling = with_logprobs(request.sampling)
        with self._lock:
            if self._stopped.is_set():
                return
            self._handle = live.submit(replace(request, request_id=live.new_request_id("playground"), sampling=sampling))
        for event in self._handle:
            self.played.add_event(event)
            self._news()
        self.error = self._handle.error or self.played.error

    def _set_status(self, doing: str) -> None:
        if self._stopped.is_set():
            raise _Stopped
        self._status, self._since = doing, time.monotonic()
        self._news()

    def _tick(self) -> None:
        while not self.done and not self._stopped.wait(STATUS_INTERVAL_SECONDS):
            if not self.played.num_tokens:
                self._news()
        self._news()
        with self._lock:
            self._left = self._stopped.is_set() and self._handle is None and not self.done
        if self._left:
            self._end()


def with_logprobs(sampling: Any) -> Any:
    """Return sampling parameters with log probabilities where they can be computed; the tokens stay the same."""
    if sampling.beams:
        return sampling
    return sampling.model_copy(update={"logprobs": max(NUM_LOGPROBS, sampling.logprobs or 0)})


def format_token_bytes(piece: bytes) -> str:
    """A token's bytes as a reader can tell them apart: a text in quotes, or the bytes where they are none."""
    try:
        return repr(piece.decode())
    except UnicodeDecodeError:
        return " ".join(f"{byte:02X}" for byte in piece)
