"""Generate one text in the background and collect its tokens and times from its events."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from workbench.errors import WorkbenchError
from workbench.machine.processor import cpu_times, others_cpu_share
from workbench.widgets.job import Job
from workbench.widgets.playground.runners import RunnerCache
from workbench.widgets.tokens.text import GeneratedToken

TokenText = Callable[[int], str]
NUM_LOGPROBS = 5  # log-probabilities requested for every token, unless the experiment requests more
NUM_COMPARED_LOGPROBS = 20  # enough to hold mostly the token that another column chose
SIDES = ("left", "right")  # names of two columns
STATUS_INTERVAL_SECONDS = 0.1  # between two looks at the status and at `stop`
COMPLETE = {"stop", "length", "not_chosen"}  # finish reasons of requests that were neither stopped nor failed
STILL_LOADING = "stopped; what was begun of its runner still goes on, and is kept if it is finished"


@dataclass
class PlayedRequest:
    """The tokens and times of one request, built by `add_event` from the events of the request and its steps.

    `trailing_text` is the text that appeared only when a sample ended. Times are in seconds.
    """

    token_text: TokenText  # from a token id to its text
    tokens_by_sample: dict[int, list[GeneratedToken]] = field(default_factory=dict)
    trailing_text: dict[int, str] = field(default_factory=dict)
    finish_reasons: dict[int, str] = field(default_factory=dict)
    prompt_tokens: int = 0
    arrival: float = math.nan
    first_token_time: float = math.nan
    last_token_time: float = math.nan
    kv_bytes: int = 0  # bytes of the pages in use in the last step
    kv_peak: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    compiles: tuple[int, int] | None = None  # the runner's compilations after the first and after the last step
    # For each token of the first sample: its time, its log-probability, and the most probable ones by token id.
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
        """Return the seconds per token after the first, (last - first) / (n - 1), for the sample with the largest
        number n of tokens."""
        longest = max(map(len, self.tokens_by_sample.values()), default=0)
        return (self.last_token_time - self.first_token_time) / (longest - 1) if longest > 1 else None

    @property
    def throughput(self) -> float | None:
        """Return the tokens per second of all samples together, from the request's arrival to the last token; None if
        unknown."""
        return (
            self.num_tokens / (self.last_token_time - self.arrival)
            if self.num_tokens and self.last_token_time > self.arrival
            else None
        )

    @property
    def kv_bytes_per_token(self) -> float | None:
        """Return the bytes of the pages in use in the last step, divided by the tokens of prompt and samples; None if
        unknown."""
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
    """Raised to stop loading a runner after `stop`."""


class Generation:
    """The generation of one request in a background job: `played` grows until the job has ended; `status` describes the
    present work.

    Loading a runner cannot be interrupted: after `job.stop` it continues up to the next piece of its work.

    Args:
        experiment: settings of the engine, and its only request.
        runners: cache that returns or loads the runner.
        on_change: called whenever there is something new to draw.
        compared: whether times and tokens are compared with another request's: the prefix cache is emptied first, a new
            runner plays a hidden warm-up, and each token gets `NUM_COMPARED_LOGPROBS` log-probabilities.
    """

    def __init__(self, experiment: Any, runners: RunnerCache, on_change: Callable[[], None], compared: bool = False):
        self.experiment, self.played, self.is_loading = experiment, PlayedRequest(str), True
        self._runners, self._on_change, self._compared = runners, on_change, compared
        self._handle: Any = None
        self._status, self._since = "", time.monotonic()
        self._lock = threading.RLock()  # reentrant: a signal may call `stop` in a thread that is within `_submit`
        self.job = Job(self._work, on_stop=self._stop_request, name="playground")

    @property
    def is_left(self) -> bool:
        """Return True if the user stopped this generation while its runner was loading; the loading cannot be
        interrupted, and continues in the background."""
        with self._lock:
            return self.job.stopped and self.is_loading

    @property
    def status(self) -> str:
        if self.played.num_tokens:
            return "generating"
        return f"{self._status} ({time.monotonic() - self._since:.0f} s)" if self._status else ""

    def _stop_request(self) -> None:
        with self._lock:
            if self._handle is not None:
                self._handle.stop()

    def _work(self, _: Job) -> None:
        try:
            self._generate()
        except _Stopped:
            pass
        finally:
            self.is_loading = False
            self._on_change()

    def _generate(self) -> None:
        from workbench.engine.runner_thread import RunnerThread
        from workbench.experiment.build import requests_of

        runner = self._runners.get(self.experiment, self._set_status)
        if runner.tokenizer is None:
            raise WorkbenchError(f"model {self.experiment.model.name!r} has no tokenizer: it cannot read a prompt")
        token_bytes = runner.tokenizer.token_bytes  # keeps no reference to the runner
        self.played.token_text = lambda token: format_token_bytes(token_bytes(token))
        (request,) = requests_of(self.experiment, runner.tokenizer, runner.model.spec.vocab_size)
        self._set_status("waiting for the first token; the backend may be compiling")
        live = RunnerThread.attach(runner)
        count = NUM_COMPARED_LOGPROBS if self._compared else NUM_LOGPROBS
        request = replace(request, sampling=with_logprobs(request.sampling, count))
        if self._compared:
            if self._runners.is_new(self.experiment):
                self._warm_up(live, request)
            live.call(lambda owned: owned.reset_prefix_cache())
        for event in self._submit(live, request):
            self.played.add_event(event)
            self._on_change()
        if error := self._handle.error or self.played.error:
            raise WorkbenchError(error)

    def _warm_up(self, live: Any, request: Any) -> None:
        """Generate two hidden tokens, because a runner's first request compiles and touches memory.

        After a stopped or failed warm-up, the next play warms up again.
        """
        short = request.sampling.model_copy(update={"max_tokens": 2})
        ends = {event.reason for event in self._submit(live, replace(request, sampling=short))
                if event.kind == "finished"}  # fmt: skip
        if ends and ends <= COMPLETE:
            self._runners.mark_used(self.experiment)

    def _submit(self, live: Any, request: Any) -> Any:
        """Submit a request and return its handle. Raises _Stopped after `job.stop`."""
        with self._lock:
            if self.job.stopped:
                raise _Stopped
            self.is_loading = False
            self._handle = live.submit(replace(request, request_id=live.new_request_id("playground")))
            return self._handle

    def _set_status(self, doing: str) -> None:
        if self.job.stopped:
            raise _Stopped
        self._status, self._since = doing, time.monotonic()
        self._on_change()


class BackgroundPlay(Job):
    """A background job that plays one prompt under several experiments, one after the other, so that each has the
    machine to itself.

    `stop` ends the play after the present step. While a runner is being loaded it ends the play at once, but loading
    that cannot be interrupted goes on in the background.

    Args:
        experiments: one for each column.
        runners: cache that returns or loads the runners.
        on_change: called whenever there is something new to draw.
        on_end: called once, before `wait` returns.
        first: index of the column that begins.
    """

    def __init__(
        self, experiments: Sequence[Any], runners: RunnerCache, on_change: Callable[[], None],
        on_end: Callable[[BackgroundPlay], None], first: int = 0,
    ):  # fmt: skip
        super().__init__(self._play, lambda _: on_end(self), self._stop_generations, "play")
        self.generations = [Generation(each, runners, on_change, len(experiments) > 1) for each in experiments]
        self.first, self._playing, self._on_change = first, self.generations[first], on_change
        self._is_over = False  # before `done`: its end is drawn first
        self.others_share: float | None = None  # other processes' share of the processor meanwhile

    @property
    def played(self) -> tuple[PlayedRequest, ...]:
        return tuple(each.played for each in self.generations)

    @property
    def cancelled(self) -> bool:
        return self.stopped or any("cancelled" in each.finish_reasons.values() for each in self.played)

    @property
    def errors(self) -> tuple[str, ...]:
        """Return for each column the reason of its failure, or "" if it has not failed."""
        return tuple(each.job.error for each in self.generations)

    @property
    def status(self) -> str:
        if self._is_over:
            return STILL_LOADING if self._playing.is_left else ""
        if self.stopped:
            return "stopping, after the step that is being computed"
        status = self._playing.status
        side = f"{SIDES[self.generations.index(self._playing)]}: " if len(self.generations) > 1 else ""
        return status and side + status

    def _play(self, _: Job) -> None:
        before, shown = cpu_times(), ""
        for generation in (*self.generations[self.first :], *self.generations[: self.first]):
            self._playing = generation
            generation.job.start()
            while not generation.job.wait(STATUS_INTERVAL_SECONDS) and not generation.is_left:
                if not generation.played.num_tokens and shown != (shown := self.status):
                    self._on_change()
            if self.cancelled or generation.job.error:
                break
        self.others_share, self._is_over = others_cpu_share(before), True

    def _stop_generations(self) -> None:
        for each in self.generations:
            each.job.stop()


def with_logprobs(sampling: Any, count: int = NUM_LOGPROBS) -> Any:
    """Return sampling parameters with at least `count` log-probabilities (not for beams); the tokens stay the same."""
    if sampling.beams:
        return sampling
    return sampling.model_copy(update={"logprobs": max(count, sampling.logprobs or 0)})


def format_token_bytes(piece: bytes) -> str:
    """Return a token's text in quotes, or its bytes in hexadecimal if they are not text."""
    try:
        return repr(piece.decode())
    except UnicodeDecodeError:
        return " ".join(f"{byte:02X}" for byte in piece)
