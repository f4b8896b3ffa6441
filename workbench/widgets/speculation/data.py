"""Run a prompt with and without a speculator, place drafted tokens in the text, and compute speculation figures from a
run's tables."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from workbench.errors import WorkbenchError
from workbench.trace.events import Event, Finished
from workbench.trace.recorder import Recorder, row_name
from workbench.widgets.job import Job
from workbench.widgets.single_request import single_request

if TYPE_CHECKING:
    from workbench.request import Request

TableRows = Sequence[Mapping[str, Any]]
SAMPLING = {"max_tokens": 64, "temperature": 0.0}  # of a text, unless given
MIN_PLAIN_STEPS = 5  # steps without verification that are needed to time one


@dataclass(frozen=True)
class DraftVerification:
    """One verification of the drafted `token_ids` (None each in older records), of which the first `accepted` were
    accepted.

    `emitted` are the step's output tokens, from output index `index` on (-1: none)."""

    step: int
    token_ids: tuple[int | None, ...]
    accepted: int
    index: int
    emitted: tuple[int, ...]


@dataclass(frozen=True)
class PlacedToken:
    """One token with its role in the output.

    `kind` is plain, accepted, rejected, untried (drafted after a rejected token), unused (drafted beyond the request's
    end), corrected or bonus; `verification` is the number of its verification from 1 on, or 0 without one."""

    token: int | None
    kind: str
    verification: int = 0
    draft_position: int = 0  # position in the draft, from 1; 0 if not drafted


@dataclass(frozen=True)
class SpeculationTables:
    """The tables of one run: `verifications`, `tokens` and `steps`, as in a record."""

    verifications: TableRows = field(repr=False)
    tokens: TableRows = field(repr=False)
    steps: TableRows = field(repr=False)

    @classmethod
    def from_source(cls, source: Any) -> SpeculationTables:
        """Read the tables of a record, its folder, or events.

        Raises:
            WorkbenchError: the iterable holds other values than events, or the run has no tokens.
        """
        if not hasattr(source, "read_table") and not isinstance(source, str) and hasattr(source, "__iter__"):
            recorder = Recorder()
            recorder.events = list(source)
            if not all(isinstance(each, Event) for each in recorder.events):
                raise WorkbenchError("events: give what a runner streams, a record, a run's folder, or a runner")
            return cls(recorder.verifications(), recorder.tokens(), recorder.steps())
        record: Any = source
        if not hasattr(source, "read_table"):
            from workbench.runs.record import Record

            record = Record.open(source)
        if not (record.path / "tokens.parquet").is_file():
            raise WorkbenchError(f"run {record.path}: holds no tokens.parquet; give a run of one experiment")
        names = [f"{name}.parquet" for name in ("verifications", "tokens", "steps")]
        verifications, tokens, steps = (
            record.read_table(name).to_pylist() if (record.path / name).is_file() else [] for name in names
        )
        return cls(verifications, tokens, steps)

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(row_name(dict(row)) for row in self.tokens))

    def token_ids(self, name: str) -> list[int]:
        return [row["token_id"] for row in self.tokens if row_name(dict(row)) == name]

    def verifications_of(self, name: str) -> list[DraftVerification]:
        given: dict[int, list[Mapping]] = {}
        for row in self.tokens:
            if row_name(dict(row)) == name:
                given.setdefault(row["step"], []).append(row)
        return [
            DraftVerification(
                row["step"], tuple(row.get("token_ids") or [None] * row["drafted"]), row["accepted"],
                rows[0]["index"] if (rows := given.get(row["step"], [])) else -1, tuple(r["token_id"] for r in rows),
            )
            for row in self.verifications
            if row_name(dict(row)) == name
        ]  # fmt: skip


def place_tokens(token_ids: Sequence[int], verifications: Sequence[DraftVerification]) -> list[PlacedToken]:
    """Return the output token by token, with rejected drafts before the token that was sampled instead."""
    found: list[PlacedToken] = []
    at = 0
    for number, check in enumerate(verifications, 1):
        if check.index < 0:  # the request ended before this step emitted a token
            continue
        found += [PlacedToken(token, "plain") for token in token_ids[at : check.index]]
        stood = min(check.accepted, len(check.emitted))
        found += [PlacedToken(token, "accepted", number, place) for place, token in enumerate(check.emitted[:stood], 1)]
        for place, token in enumerate(check.token_ids[stood:], stood + 1):
            kind = "unused" if place <= check.accepted else "rejected" if place == check.accepted + 1 else "untried"
            found.append(PlacedToken(token, kind, number, place))
        last = "bonus" if check.accepted == len(check.token_ids) else "corrected"
        found += [PlacedToken(token, last, number) for token in check.emitted[check.accepted :]]
        at = check.index + len(check.emitted)
    return found + [PlacedToken(token, "plain") for token in token_ids[at:]]


@dataclass(frozen=True)
class SpeculationSpeed:
    """The tokens per second with and without drafts, and the speed-up predicted from acceptance and the cost of a
    step."""

    tokens_per_s: float
    plain_tokens_per_s: float
    cost: float  # median time of a step, relative to a plain step
    predicted: float | None
    own: bool = False  # whether the plain steps are the same run's steps without verification

    @property
    def measured(self) -> float:
        return self.tokens_per_s / self.plain_tokens_per_s


def speculation_figures(run: SpeculationTables) -> dict[str, Any]:
    """Return the acceptance figures of a run, as in the run's summary."""
    from workbench.runs.metrics import acceptance_metrics

    return acceptance_metrics(run.verifications, run.steps)


def speculation_speed(run: SpeculationTables, plain: SpeculationTables | None) -> SpeculationSpeed | None:
    """Return the speeds with and without drafts; None if too few steps without drafts are known. These come from the
    run `plain`, or else from `run` itself."""
    from workbench.runs.metrics import expected_speedup, expected_tokens_per_verification, steady_decode_steps

    loads = Counter(step["requests"] for step in run.steps if step["phase"] == "decode")
    load = max(loads, key=lambda each: (loads[each], each), default=0)
    mine = steady_decode_steps(run.steps, load)
    theirs = (
        steady_decode_steps(plain.steps, load) if plain is not None else [s for s in mine if not s["drafted_tokens"]]
    )
    if not mine or len(theirs) < (1 if plain is not None else MIN_PLAIN_STEPS):
        return None
    ours, others = (_sum(steps, "decode_tokens") / _sum(steps, "wall_seconds") for steps in (mine, theirs))
    cost = median(s["wall_seconds"] for s in mine) / median(s["wall_seconds"] for s in theirs)
    chance = speculation_figures(run)["chance"]
    checked = sum(bool(step["drafted_tokens"]) for step in mine) / len(mine)
    predicted = None
    if chance is not None:
        given = [expected_tokens_per_verification(chance, check["drafted"]) for check in run.verifications]
        predicted = expected_speedup(sum(given) / len(given), checked, cost)
    return SpeculationSpeed(ours, others, cost, predicted, own=plain is None)


def _sum(rows: TableRows, name: str) -> float:
    return math.fsum(row[name] for row in rows)


@dataclass
class SpeculationEvents:
    """The events of the shown run with drafts, and those of all runs; the first run of each kind is not timed."""

    current: list[Event] = field(default_factory=list)
    drafted: list[list[Event]] = field(default_factory=list)
    plain: list[list[Event]] = field(default_factory=list)
    problem: str = ""


class SpeculationComparison:
    """A comparison that runs a request with and without drafts in turn, in the background; `events` grows meanwhile.

    There are `rounds` timed runs of each kind after an untimed one; with 0, only the untimed run with drafts. At the
    end the runner gets its own speculator back; another comparison on the runner waits until then."""

    def __init__(
        self, runner: Any, prompt: str | Sequence[int] | Request | None, speculate: Any, rounds: int,
        sampling: dict[str, Any],
    ):  # fmt: skip
        if runner.core.speculator is None and speculate is None:
            raise WorkbenchError('runner: it drafts nothing; give speculate="prompt_lookup" or "draft"')
        self.runner, self.rounds, self.events = runner, rounds, SpeculationEvents()
        self.request = single_request("SpeculationView", runner, prompt, sampling, SAMPLING)
        self._speculator = runner.core.speculator if speculate is None else _build_speculator(runner, speculate)
        self._handle: Any = None
        self._exclusive: Any = None
        self._job: Job | None = None

    def begin(self, on_change: Callable[[], None], on_end: Callable[[], None]) -> None:
        """Start the runs and return at once; `on_change` is called with new events, `on_end` once at the end."""
        from workbench.engine.runner_thread import RunnerThread

        live = RunnerThread.attach(self.runner)
        self._exclusive = live.exclusive
        live.exclusive.enqueue(self)

        def work(job: Job) -> None:
            on_change()
            try:
                if live.exclusive.acquire(self, lambda: job.stopped):
                    on_change()
                    self._alternate(live, on_change)
            finally:
                live.exclusive.release(self)

        def end(job: Job) -> None:
            self.events.problem = job.error
            on_end()

        self._job = Job(work, end, self._stop_request, "speculation view")
        self._job.start()

    def stop(self) -> None:
        if self._job is not None:
            self._job.stop()

    def _stop_request(self) -> None:
        if self._exclusive is not None:
            self._exclusive.notify()
        if self._handle is not None:
            self._handle.stop()

    @property
    def waiting(self) -> bool:
        """Return whether this comparison waits for another one on the same runner."""
        return self.working and self._exclusive is not None and not self._exclusive.is_first(self)

    @property
    def working(self) -> bool:
        return self._job is not None and not self._job.done

    def wait(self, seconds: float | None = None) -> None:
        if self._job is not None:
            self._job.wait(seconds)

    def _alternate(self, live: Any, news: Callable[[], None]) -> None:
        before = live.call(lambda runner: runner.core.speculator)
        turns = (self._speculator, self.events.drafted), (None, self.events.plain)
        try:
            for turn in range(self.rounds + 1):
                for ours, kept in turns[: 2 if self.rounds else 1]:
                    live.call(lambda runner, ours=ours: runner.core.set_speculator(ours))
                    events: list[Event] = [] if turn or ours is None else self.events.current
                    if not self._run_once(live, events, news):
                        return
                    kept.append(events)
                    news()
        finally:
            live.call(lambda runner: runner.core.set_speculator(before))

    def _run_once(self, live: Any, events: list[Event], news: Callable[[], None]) -> bool:
        """Run the request once, and add its events to `events`; return whether it was not stopped."""
        assert self._job is not None
        self._handle = live.submit(self.request)
        if self._job.stopped:
            self._handle.stop()
        for event in self._handle:
            events.append(event)
            if isinstance(event, Finished):
                if event.reason == "cancelled":  # by the kernel's stop button, say
                    self._job.stop()
                if event.error:
                    raise WorkbenchError(event.error)
            if events is self.events.current:
                news()
        return not self._job.stopped


def _build_speculator(runner: Any, speculate: Any) -> Any:
    from workbench.engine.runner import Runner
    from workbench.engine.speculator import build_speculator
    from workbench.speculative.config import NoSpeculation, parse_speculation

    settings = parse_speculation(speculate)
    if isinstance(settings, NoSpeculation):
        raise WorkbenchError('speculate: none drafts nothing; give "prompt_lookup", "draft" or a proposer of your own')
    config = runner.config.model_copy(update={"speculate": settings, "backend": str(runner.core.backends.decode)})
    return build_speculator(config, runner.loaded_model, Runner)
