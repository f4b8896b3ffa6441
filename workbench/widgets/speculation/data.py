"""Run a prompt with a speculator and without, place drafted tokens in the text, and compute the figures of speculation
from a run's tables."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from workbench.errors import WorkbenchError, describe_error
from workbench.request import Request, SamplingParameters
from workbench.trace.events import Event, Finished
from workbench.trace.recorder import Recorder, row_name
from workbench.waiting import join_and_serve

TableRows = Sequence[Mapping[str, Any]]
MIN_PLAIN_STEPS = 5  # steps without a check, to know what one takes


@dataclass(frozen=True)
class DraftVerification:
    """`token_ids` were drafted (unknown of older records: None each), the first `accepted` stand; `emitted` are the
    output tokens from `index` on that the step gave."""

    step: int
    token_ids: tuple[int | None, ...]
    accepted: int
    index: int
    emitted: tuple[int, ...]


@dataclass(frozen=True)
class PlacedToken:
    """A token in its place: `kind` is plain, accepted, rejected (the one that fell), untried (after it), unused (after
    the request's end), corrected or bonus; `check` the number of its check from 1, 0 where there was none."""

    token: int | None
    kind: str
    verification: int = 0
    draft_position: int = 0  # in the draft, from 1


@dataclass(frozen=True)
class SpeculationTables:
    """Tables of one run: `verifications`, `tokens` and `steps` as a record has them."""

    verifications: TableRows = field(repr=False)
    tokens: TableRows = field(repr=False)
    steps: TableRows = field(repr=False)

    @classmethod
    def from_source(cls, source: Any) -> SpeculationTables:
        """From a record, its folder, or events."""
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
    """The output token by token, with what was drafted and did not stand before what came instead."""
    found: list[PlacedToken] = []
    at = 0
    for number, check in enumerate(verifications, 1):
        if check.index < 0:  # ended before it gave anything
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
    """Tokens a second drafted and plain, and the speed-up that follows from acceptance and what a step takes."""

    tokens_per_s: float
    plain_tokens_per_s: float
    cost: float  # a step's time, in plain steps
    predicted: float | None
    own: bool = False  # plain steps are those of the same run that checked nothing

    @property
    def measured(self) -> float:
        return self.tokens_per_s / self.plain_tokens_per_s


def speculation_figures(run: SpeculationTables) -> dict[str, Any]:
    """As in a run's summary."""
    from workbench.runs.metrics import acceptance_metrics

    return acceptance_metrics(run.verifications, run.steps)


def speculation_speed(run: SpeculationTables, plain: SpeculationTables | None) -> SpeculationSpeed | None:
    """Return the speeds, or None where they are unknown: without `plain`, where every step of the run checked."""
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
    """Events of the run with drafts that is looked at, and of all runs; the first of each is not timed."""

    current: list[Event] = field(default_factory=list)
    drafted: list[list[Event]] = field(default_factory=list)
    plain: list[list[Event]] = field(default_factory=list)
    problem: str = ""


class SpeculationComparison:
    """`both` grows meanwhile. Drafted and plain take turns, `rounds` of each after one of each that is not timed; with
    0 there is the drafted run alone. After it the runner drafts again as it did; another trial on the runner waits
    until then."""

    def __init__(
        self, runner: Any, prompt: str | Sequence[int] | None, speculate: Any, rounds: int, sampling: dict[str, Any]
    ):
        if runner.core.speculator is None and speculate is None:
            raise WorkbenchError('runner: it drafts nothing; give speculate="prompt_lookup" or "draft"')
        if prompt is None:
            raise WorkbenchError("prompt: a runner needs one, as text or token ids")
        self.runner, self.rounds, self.events = runner, rounds, SpeculationEvents()
        if isinstance(prompt, str):
            (request,) = runner.make_requests(prompt, sampling)
        else:
            request = Request("", tuple(map(int, prompt)), SamplingParameters(**sampling))
        if request.sampling.num_sequences > 1:
            raise WorkbenchError("n, best_of, beams: the view looks at one sample; leave them out")
        self.request = request
        self._speculator = runner.core.speculator if speculate is None else _build_speculator(runner, speculate)
        self._handle: Any = None
        self._exclusive: Any = None
        self._stopped, self._thread = False, None

    def begin(self, on_change: Callable[[], None], on_end: Callable[[], None]) -> None:
        """Return at once; `news` is called as events come, `end` when all is over."""
        from workbench.engine.runner_thread import RunnerThread

        live = RunnerThread.attach(self.runner)
        self.request, self._exclusive = (
            replace(self.request, request_id=live.new_request_id("speculation")),
            live.exclusive,
        )
        live.exclusive.enqueue(self)

        def work() -> None:
            on_change()
            try:
                if live.exclusive.acquire(self, lambda: self._stopped):
                    on_change()
                    self._alternate(live, on_change)
            except Exception as error:
                self.events.problem = describe_error(error)
            finally:
                live.exclusive.release(self)
            on_end()

        self._thread = threading.Thread(target=work, name="speculation view", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped = True
        if self._exclusive is not None:
            self._exclusive.notify()
        if self._handle is not None:
            self._handle.stop()

    @property
    def waiting(self) -> bool:
        """For another trial on the same runner."""
        return self.working and self._exclusive is not None and not self._exclusive.is_first(self)

    @property
    def working(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def wait(self, seconds: float | None = None) -> None:
        if self._thread is None:
            return
        try:
            join_and_serve(self._thread, seconds)
        except KeyboardInterrupt:
            self.stop()
            raise

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
        """Run the request once; return whether it ran to its end."""
        self._handle = live.submit(self.request)
        if self._stopped:
            self._handle.stop()
        for event in self._handle:
            events.append(event)
            if isinstance(event, Finished):
                self._stopped = self._stopped or event.reason == "cancelled"  # by the kernel's stop button, say
                if event.error:
                    raise WorkbenchError(event.error)
            if events is self.events.current:
                news()
        return not self._stopped


def _build_speculator(runner: Any, speculate: Any) -> Any:
    from workbench.engine.runner import Runner
    from workbench.engine.speculator import build_speculator
    from workbench.speculative.config import NoSpeculation, parse_speculation

    settings = parse_speculation(speculate)
    if isinstance(settings, NoSpeculation):
        raise WorkbenchError('speculate: none drafts nothing; give "prompt_lookup", "draft" or a proposer of your own')
    config = runner.config.model_copy(update={"speculate": settings, "backend": str(runner.core.backends.decode)})
    return build_speculator(config, runner.loaded_model, Runner)
