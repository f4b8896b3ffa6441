"""Generate one text in the background and gather its tokens and times from its events."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from workbench.errors import WorkbenchError, describe_error
from workbench.waiting import wait_and_serve
from workbench.widgets.playground.runners import RunnerCache
from workbench.widgets.tokens.text import GeneratedToken

TokenText = Callable[[int], str]
NUM_LOGPROBS = 5  # that are shown of every token, unless the experiment asks for more
STATUS_INTERVAL_SECONDS = 0.5  # seconds between two words on how long something takes
COMPLETE = {"stop", "length", "not_chosen"}  # how a request finishes that was neither stopped nor failed
STILL_LOADING = "stopped; what was begun of its runner still goes on, and is kept if it is finished"


@dataclass
class PlayedRequest:
    """Tokens and times of one request: `add_event` takes its events and those of its steps, as they come.

    `trailing_text` is what a sample's end added to its text. Times are in seconds.
    """

    token_text: TokenText  # a token's own text
    tokens_by_sample: dict[int, list[GeneratedToken]] = field(default_factory=dict)
    trailing_text: dict[int, str] = field(default_factory=dict)
    finish_reasons: dict[int, str] = field(default_factory=dict)
    prompt_tokens: int = 0
    arrival: float = math.nan
    first_token_time: float = math.nan  # when the first token came
    last_token_time: float = math.nan
    kv_bytes: int = 0  # of the pages that the last step was computed on
    kv_peak: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    compiles: tuple[int, int] | None = None  # of the runner, after the first and after the last of its steps
    # Of the first sample: when each token came, and the model's log-probabilities then, its own and by token id.
    token_times: list[float] = field(default_factory=list)
    logprobs: list[tuple[float | None, dict[int, float]]] = field(default_factory=list)
    error: str = ""

    def add_event(self, event: Any) -> None:
        match event.kind:
            case "submitted":
                self.arrival, self.prompt_tokens = event.arrival, event.prompt_tokens
            case "decoded":
                self._add_token(event)
            case "stepped":
                self.kv_bytes, self.kv_peak = event.kv_bytes, max(self.kv_peak, event.kv_bytes)
                self.steps += 1
                self.drafted, self.accepted = self.drafted + event.drafted_tokens, self.accepted + event.accepted_tokens
                self.compiles = (self.compiles or (event.compiles, 0))[0], event.compiles
            case "finished":
                self.trailing_text[event.sample], self.finish_reasons[event.sample] = event.text, event.reason
                if event.reason in ("refused", "error"):
                    self.error = self.error or event.error

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens_by_sample.values()))

    @property
    def ttft(self) -> float | None:
        return self.first_token_time - self.arrival if self.num_tokens else None

    @property
    def tpot(self) -> float | None:
        """Return the time between tokens, as (last - first) / (n - 1) of the sample with most tokens."""
        longest = max(map(len, self.tokens_by_sample.values()), default=0)
        return (self.last_token_time - self.first_token_time) / (longest - 1) if longest > 1 else None

    @property
    def throughput(self) -> float | None:
        """Return tokens a second of all samples, from the request's arrival to the last token."""
        return (
            self.num_tokens / (self.last_token_time - self.arrival)
            if self.num_tokens and self.last_token_time > self.arrival
            else None
        )

    @property
    def kv_bytes_per_token(self) -> float | None:
        """Return bytes of the pages in use in the last step, over the tokens of the prompt and of all samples."""
        return self.kv_bytes / (self.prompt_tokens + self.num_tokens) if self.steps and self.prompt_tokens else None

    def text(self, sample: int = 0) -> str:
        return "".join(piece.text for piece in self.tokens_by_sample.get(sample, ())) + self.trailing_text.get(
            sample, ""
        )

    def _add_token(self, event: Any) -> None:
        if not self.num_tokens:
            self.first_token_time = event.time
        self.last_token_time = event.time
        if not event.sample:
            self.token_times.append(event.time)
            self.logprobs.append((event.logprob, dict(event.top_logprobs)))
        chances = tuple((self.token_text(token), math.exp(logprob)) for token, logprob in event.top_logprobs)
        chance = None if event.logprob is None else math.exp(event.logprob)
        piece = GeneratedToken(event.token_id, event.text, self.token_text(event.token_id), chance, chances)
        self.tokens_by_sample.setdefault(event.sample, []).append(piece)


class _Stopped(Exception):
    """Stop loading a runner that is no longer wanted."""


class BackgroundGeneration:
    """Play one request in the background: from `start` on `played` grows until `done`, and `status` says what it does.

    `stop` ends it after the step that is computed. While its runner is being made it ends at once, though a piece of
    that work which cannot be broken off still goes on by itself.

    Args:
        experiment: settings of the engine, and its only request.
        runners: where its runner is looked for, or made.
        on_change: called whenever there is something to draw.
        on_end: called once, before `wait` returns.
        num_logprobs: log-probabilities that each token is played with, unless the experiment asks for more.
        timed: play it so that it can be compared with another: the prefix cache is emptied, and a runner's first
            request comes after a warm-up that is not shown.
    """

    def __init__(
        self,
        experiment: Any,
        runners: RunnerCache,
        on_change: Callable[[], None],
        on_end: Callable[[BackgroundGeneration], None],
        num_logprobs: int = NUM_LOGPROBS,
        timed: bool = False,
    ):
        self.experiment, self.played, self.error = experiment, PlayedRequest(str), ""
        self._runners, self._on_change, self._on_end = runners, on_change, on_end
        self._num_logprobs, self._timed = num_logprobs, timed
        self._handle: Any = None
        self._status, self._since = "", time.monotonic()
        self._lock = threading.RLock()  # a signal may stop what its own thread is just stopping
        self._stopped, self._done, self._reported = threading.Event(), threading.Event(), threading.Event()
        self._left = False  # stopped, and what cannot be broken off goes on

    def start(self) -> None:
        from workbench.stop_button import register_stoppable

        register_stoppable(self)
        threading.Thread(target=self._work, name="playground", daemon=True).start()
        threading.Thread(target=self._tick, name="playground's clock", daemon=True).start()

    @property
    def done(self) -> bool:
        return self._done.is_set()

    @property
    def stopped(self) -> bool:
        return self._stopped.is_set() or "cancelled" in self.played.finish_reasons.values()

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
            return wait_and_serve(self._reported.wait, seconds)
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
        self._on_change()

    def _end(self) -> None:
        with self._lock:
            if self.done:
                return
            self._done.set()
        try:
            self._on_end(self)
        finally:
            self._reported.set()

    def _generate(self) -> None:
        from workbench.engine.runner_thread import RunnerThread
        from workbench.experiment.build import requests_of

        runner = self._runners.get(self.experiment, self._set_status)
        if runner.tokenizer is None:
            raise WorkbenchError(f"model {self.experiment.model.name!r} has no tokenizer: it cannot read a prompt")
        token_bytes = runner.tokenizer.token_bytes  # of the runner nothing else is kept
        self.played.token_text = lambda token: format_token_bytes(token_bytes(token))
        (request,) = requests_of(self.experiment, runner.tokenizer, runner.model.spec.vocab_size)
        self._set_status("waiting for the first token; what a backend compiles is compiled now")
        live = RunnerThread.attach(runner)
        request = replace(request, sampling=with_logprobs(request.sampling, self._num_logprobs))
        if self._timed:
            if self._runners.is_new(self.experiment):
                self._warm_up(live, request)
            live.call(lambda owned: owned.reset_prefix_cache())
        if (handle := self._submit(live, request)) is None:
            return
        for event in handle:
            self.played.add_event(event)
            self._on_change()
        self.error = handle.error or self.played.error

    def _warm_up(self, live: Any, request: Any) -> None:
        """Play two tokens that are not shown, since a runner compiles and touches everything once.

        A warm-up that was stopped, or failed, is none: the next play begins with another.
        """
        short = request.sampling.model_copy(update={"max_tokens": 2})
        events = self._submit(live, replace(request, sampling=short)) or ()
        ends = {event.reason for event in events if event.kind == "finished"}
        if ends and ends <= COMPLETE:
            self._runners.mark_used(self.experiment)

    def _submit(self, live: Any, request: Any) -> Any:
        """Submit a request and return its handle; None where it was stopped before."""
        with self._lock:
            if self._stopped.is_set():
                return None
            self._handle = live.submit(replace(request, request_id=live.new_request_id("playground")))
            return self._handle

    def _set_status(self, doing: str) -> None:
        if self._stopped.is_set():
            raise _Stopped
        self._status, self._since = doing, time.monotonic()
        self._on_change()

    def _tick(self) -> None:
        while not self.done and not self._stopped.wait(STATUS_INTERVAL_SECONDS):
            if not self.played.num_tokens:
                self._on_change()
        self._on_change()
        with self._lock:
            self._left = self._stopped.is_set() and self._handle is None and not self.done
        if self._left:
            self._end()


def with_logprobs(sampling: Any, count: int = NUM_LOGPROBS) -> Any:
    """Return sampling parameters with log probabilities where they can be computed; the tokens stay the same."""
    if sampling.beams:
        return sampling
    return sampling.model_copy(update={"logprobs": max(count, sampling.logprobs or 0)})


def format_token_bytes(piece: bytes) -> str:
    """Return a token's text in quotes, or its bytes in hexadecimal where they are no text."""
    try:
        return repr(piece.decode())
    except UnicodeDecodeError:
        return " ".join(f"{byte:02X}" for byte in piece)
