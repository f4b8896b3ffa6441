"""Run served requests again among their neighbours, in the steps that were recorded.

    recorded | r1 n s | r1 n s | n t |     r1 is asked for; n and s shared its steps, t shared none of them
    replayed | r1 n s | r1 n s | n   |     each from its first step to its last

A server goes on for long: what its cache held at the time is gone. Tokens that a request found there, or that were
swapped in from the CPU, are computed in steps of their own before; a request that is not kept is missing from its
steps. Under `batch_invariant` neither changes a bit, and what was done is listed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from workbench.display import Displayable, Table
from workbench.engine.config import EngineConfig
from workbench.engine.inputs import sample_id
from workbench.engine.loaded_model import LoadedModel
from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.kv_cache.settings import NoOffload, NoPrefixCache
from workbench.request import FinishReason, Request
from workbench.scheduler.policy import SchedulerDecision, SchedulerState, Turn
from workbench.trace.events import Event, Finished, SpanRecord, StepPlanned

OWN_END = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.NOT_CHOSEN)  # any other came from outside
EXTRA_PAGES_PER_SEQUENCE = 2  # a page that is begun, and one for drafts


class RecordedEnd(NamedTuple):
    """The end of a sample: its reason, and all tokens that were sampled."""

    sample: int
    reason: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class ServedRequest:
    """A request as it was submitted, and the ends of its samples; none of those that go on."""

    request: Request
    ends: tuple[RecordedEnd, ...] = ()


@dataclass(frozen=True)
class ReplayedSample:
    """A sample's tokens then and now. `place` is the first that differs, None for equal ones; `was` or `now` is None
    where that answer ends before. One that `is_cut` was ended from outside, and is compared as far as it came."""

    request_id: str
    sample: int
    is_neighbour: bool
    tokens: int
    reason: str
    is_cut: bool
    place: int | None = None
    was: int | None = None
    now: int | None = None

    def __str__(self) -> str:
        name = f"{self.request_id}, sample {self.sample}" if self.sample else self.request_id
        cut = f", as far as it came ({self.reason})" if self.is_cut else ""
        found = f"{self.tokens} tokens equal{cut}"
        if self.place is not None:
            was, now = ("the end" if each is None else each for each in (self.was, self.now))
            found = f"token {self.place} of {self.tokens} was {was}, is {now}"
        return f"{name}: {found}"


@dataclass(frozen=True)
class RequestReplay(Displayable):
    """The outcome of a replay: the steps as recorded, each sample, and what was done in another way than then."""

    request_id: str
    steps: tuple[StepPlanned, ...]
    samples: tuple[ReplayedSample, ...]
    remarks: tuple[str, ...] = ()

    @property
    def identical(self) -> bool:
        return all(each.place is None for each in self.samples)

    def _lines(self) -> Iterable[str]:
        neighbours = len({each.request_id for each in self.samples if each.is_neighbour})
        first, last = self.steps[0].step, self.steps[-1].step
        yield f"{self.request_id}: {'identical tokens' if self.identical else 'tokens DIFFER'}, {neighbours} neighbours"
        yield f"steps      {len(self.steps)} walked, {first} to {last} of the record"
        for is_neighbour, name in ((False, "request"), (True, "neighbour")):
            yield from (f"{name:10} {each}" for each in self.samples if each.is_neighbour is is_neighbour)
        yield from (f"otherwise  {each}" for each in self.remarks)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _display_table(self) -> Table:
        first, *others = self._lines()
        return Table(first, [(line,) for line in others], ("replayed",))

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        steps = [{"step": each.step, "spans": [span._asdict() for span in each.spans]} for each in self.steps]
        samples = [{**asdict(each), "text": str(each)} for each in self.samples]
        return {"id": self.request_id, "identical": self.identical, "steps": steps, "requests": samples,
                "remarks": list(self.remarks)}  # fmt: skip


def request_of(sequence: str) -> str:
    """Return the id of the request to which a sequence belongs: a sample, or a second stream."""
    return sequence.partition("#")[0].partition("+second")[0]


def neighbours_of(asked: Collection[str], steps: Iterable[StepPlanned]) -> set[str]:
    """Return the requests that shared a step with those asked for, these left out."""
    shared = [{request_of(span.sequence) for span in step.spans} for step in steps]
    return {name for names in shared if not names.isdisjoint(asked) for name in names} - {*asked}


class _RecordedSpans:
    """A policy that gives the sequences of a step the recorded spans.

    A sequence that has computed more than its next span begins with was preempted then, and is now; one that has
    computed less has turns before the others."""

    kind = "recorded spans"

    def __init__(self, starts: Mapping[str, deque[int]]):
        self.starts, self.spans = starts, list[SpanRecord]()

    def __call__(self, state: SchedulerState) -> SchedulerDecision:
        entries = {each.request_id: each for each in (*state.running, *state.waiting)}
        back = [
            each for each in state.running
            if (starts := self.starts.get(each.request_id)) and each.num_computed_tokens > starts[0]
        ]  # fmt: skip
        wanted = [(entries[span.sequence], span) for span in self.spans if span.sequence in entries]
        missing = [(each, span.start - each.num_computed_tokens) for each, span in wanted]
        behind = [Turn(each, tokens) for each, tokens in missing if tokens > 0]
        order = behind or [Turn(each, span.tokens) for each, span in wanted]
        requests = {request_of(span.sequence) for span in self.spans}  # of a second stream: its first brings it back
        return SchedulerDecision(
            order or [each for each in entries.values() if request_of(each.request_id) in requests], preempted=back
        )


class ReplayWork:
    """A replay under way: `step` until it returns False, then `result`. One thread at a time.

    Args:
        config: of the engine that served the requests.
        served: requests by id; those that are asked for and their neighbours are run.
        steps: of that engine, in order.
        asked: ids of the requests whose steps are walked.
        model: the model of `config`.
        name: what is replayed, where that is not the first of `asked`.

    Raises:
        WorkbenchError: for requests that were in no step, or that have not ended.
    """

    def __init__(
        self,
        config: EngineConfig,
        served: Mapping[str, ServedRequest],
        steps: Iterable[StepPlanned],
        asked: Sequence[str],
        model: LoadedModel,
        name: str = "",
    ):
        steps, self.asked, self.name = list(steps), asked, name or asked[0]
        self.config, neighbours = config, neighbours_of(asked, steps)
        members = {*asked, *neighbours} & served.keys()
        self.served = {name: each for name, each in served.items() if name in members}
        kept = ((each, [span for span in each.spans if request_of(span.sequence) in members]) for each in steps)
        self.steps = [(each, spans) for each, spans in kept if spans]
        seen = {request_of(span.sequence) for _, spans in self.steps for span in spans}
        for each in asked:
            if each not in seen or not served[each].ends:
                why = "was in no step" if each not in seen else "has not ended"
                raise WorkbenchError(f"replay: request {each!r} {why}; replay one that was answered")
        self.missing = neighbours - served.keys()
        self.strangers = {request_of(span.sequence) for each, _ in self.steps for span in each.spans} - members
        self.strangers -= self.missing
        starts: dict[str, deque[int]] = {}
        for _, spans in self.steps:
            for span in spans:
                starts.setdefault(span.sequence, deque()).append(span.start)
        self._policy, self._starts = _RecordedSpans(starts), starts
        self._coming = deque(self.steps)
        self._before: Counter[str] = Counter()  # tokens computed beforehand, by sequence
        self._otherwise: list[str] = []  # spans that are not as recorded
        self._ends: dict[tuple[str, int], Finished] = {}
        cut = [(name, end) for name, each in self.served.items() for end in each.ends if end.reason not in OWN_END]
        self._cuts = {sample_id(name, end.sample): len(end.token_ids) for name, end in cut}
        self._as_cut: dict[str, tuple[int, ...]] = {}  # by sequence
        self._planned: deque[SpanRecord] = deque()
        self._queue: deque[Event] = deque()
        self.runner = self._build(model)
        self._walk = self._walk_steps()

    def _build(self, model: LoadedModel) -> Runner:
        engine, context = self.config.engine, model.transformer.spec.max_position_embeddings
        cache = {"prefix": NoPrefixCache(), "offload": NoOffload(), "pages": self._pages(context)}
        schedule = {"chunked_prefill": True, "chunk_tokens": None}
        update = {
            "cache": engine.cache.model_copy(update=cache),
            "schedule": engine.schedule.model_copy(update=schedule),
        }
        runner = Runner(engine.model_copy(update=update), model, listener=self._note)
        runner.scheduler.set_policy(self._policy)
        for each in self.served.values():  # in order of arrival, in which a step's spans are packed
            runner.submit(each.request, self._queue)
        runner.core.wait_for_grammars()
        return runner

    def _pages(self, context: int) -> int:
        """Return pages for all sequences that run at once, and for the longest answer that a request may have."""
        size = self.config.cache.page_size
        last = {span.sequence: number for number, (_, spans) in enumerate(self.steps) for span in spans}
        live: dict[str, int] = {}
        most = 0
        for number, (_, spans) in enumerate(self.steps):
            for span in spans:
                live[span.sequence] = max(live.get(span.sequence, 0), span.start + span.tokens)
            most = max(most, sum(tokens // size + EXTRA_PAGES_PER_SEQUENCE for tokens in live.values()))
            live = {name: tokens for name, tokens in live.items() if last[name] > number}
        for each in self.served.values():
            sampling = each.request.sampling
            tokens = min(len(each.request.prompt_ids) + sampling.max_output_tokens, context)
            most = max(most, (tokens // size + EXTRA_PAGES_PER_SEQUENCE) * max(2, sampling.num_sequences))
        return most

    def step(self) -> bool:
        """Compute one step; return whether one may be left.

        Raises:
            WorkbenchError: for a step that cannot be formed.
        """
        return next(self._walk, False)

    def _walk_steps(self) -> Iterator[bool]:
        """Walk the recorded steps; yield after each step that is computed, of which a recorded one may need several."""
        while self._coming:
            recorded, spans = self._coming.popleft()
            live, ids = self.runner.tracker.sequences, recorded.step
            self._policy.spans = left = [span for span in spans if span.sequence in live]
            self._otherwise += [f"step {ids}: {each.sequence} has ended" for each in spans if each.sequence not in live]
            idle = 0  # steps in a row without any of them: one may preempt
            steps_left = sum(each.start + 4 for each in left)  # each computes a token that was missing
            while left:
                self._planned.clear()
                try:
                    self.runner.step()
                except WorkbenchError as error:
                    raise WorkbenchError(f"replay: step {ids} cannot be formed: {error}") from error
                self._note_cuts()
                made = {span.sequence: span for span in self._planned}
                idle = 0 if any(each.sequence in made for each in left) else idle + 1
                steps_left -= 1
                if not made or idle > 1 or not steps_left:
                    self._otherwise += [f"step {ids}: {each.sequence} could not be computed" for each in left]
                    for each in left:
                        self._starts[each.sequence].popleft()
                    break
                for span in left:
                    self._compare(ids, span, made.get(span.sequence))
                self._policy.spans = left = [
                    each for each in left
                    if each.sequence in live and not _reaches(made.get(each.sequence), each)
                ]  # fmt: skip
                yield True
        self.runner.cancel_all(self._queue)

    def _compare(self, step: int, recorded: SpanRecord, made: SpanRecord | None) -> None:
        """Note a span that is not as recorded; of one that is reached, what comes next begins elsewhere."""
        if made is None:
            return
        if not _reaches(made, recorded):
            self._before[recorded.sequence] += made.tokens
            return
        self._starts[recorded.sequence].popleft()
        if made != recorded:
            then, now = (f"{each.tokens} tokens from {each.start}" for each in (recorded, made))
            self._otherwise.append(f"step {step}: {recorded.sequence} had {then}, has {now}")

    def _note_cuts(self) -> None:
        """Note the tokens of samples that have as many as they had when they were ended from outside."""
        for name, sequence in self.runner.tracker.sequences.items():
            if self._cuts.get(name) == len(sequence.output_ids):
                self._as_cut[name] = (*sequence.output_ids,)

    def _note(self, event: Event) -> None:
        if isinstance(event, StepPlanned):
            self._planned.extend(event.spans)
        elif isinstance(event, Finished):
            self._ends[event.request_id, event.sample] = event

    def run(self) -> RequestReplay:
        """Walk all steps, and return what came of them."""
        while self.step():
            pass
        return self.result()

    def result(self) -> RequestReplay:
        """Return what came of the steps."""
        samples = [self._sample(name, end) for name, each in self.served.items() for end in sorted(each.ends)]
        samples.sort(key=lambda each: each.is_neighbour)
        return RequestReplay(self.name, tuple(each for each, _ in self.steps), tuple(samples), (*self._remarks(),))

    def _sample(self, name: str, recorded: RecordedEnd) -> ReplayedSample:
        end = self._ends.get((name, recorded.sample))
        was, now = recorded.token_ids, () if end is None else end.token_ids
        is_cut = recorded.reason not in OWN_END
        if is_cut:
            now = now[: len(was)]
            # A beam was cut in the search, or as its result was handed out, which may be another beam's text.
            now = now if now == was else self._as_cut.get(sample_id(name, recorded.sample), now)
        place = next((n for n, (one, two) in enumerate(zip(was, now, strict=False)) if one != two), None)
        if place is None and len(was) != len(now):
            place = min(len(was), len(now))
        old, new = (None if place is None or place >= len(ids) else ids[place] for ids in (was, now))
        is_neighbour = name not in self.asked
        return ReplayedSample(name, recorded.sample, is_neighbour, len(was), recorded.reason, is_cut, place, old, new)

    def _remarks(self) -> Iterable[str]:
        if not self.config.batch_invariant:
            yield "batch_invariant is off: a row may have other bits in a batch of other rows"
        if before := sum(self._before.values()):
            yield f"{before} tokens that {len(self._before)} sequences had found in a cache were computed before"
        going_on = sorted(name for name, each in self.served.items() if not each.ends)
        for names, why in (
            (sorted(self.missing), "is not kept, and was left out of its steps"),
            (sorted(self.strangers), "shared steps with neighbours alone, and was left out of them"),
            (going_on, "has not ended, and is not compared"),
        ):
            if names:
                yield f"{_listed(names)} {why}"
        if self._otherwise:
            yield f"{len(self._otherwise)} spans are not as recorded, the first: {self._otherwise[0]}"


def _reaches(made: SpanRecord | None, recorded: SpanRecord) -> bool:
    return made is not None and made.start + made.tokens > recorded.start


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more: each"
