"""Run requests again that a server has served, in the recorded steps, together with the requests that shared these
steps.

    recorded | r1 n s | r1 n s | n t |     r1 is to be replayed; n and s shared its steps, t shared none of them
    replayed | r1 n s | r1 n s | n   |     each request from its first step to its last

The contents of the server's cache at that time are gone. Tokens that a request found in the cache, or that were swapped
in from the CPU, are computed beforehand in extra steps; a request that is no longer stored is missing from its steps.
Under `batch_invariant` neither changes a bit, and these deviations are listed.
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

OWN_END = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.NOT_CHOSEN)  # others come from outside
EXTRA_PAGES_PER_SEQUENCE = 2  # a partly filled page, and one for drafts


class RecordedEnd(NamedTuple):
    """The recorded end of a sample: the finish reason, and all sampled tokens."""

    sample: int
    reason: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class ServedRequest:
    """A request as it was submitted, and the recorded ends of its finished samples."""

    request: Request
    ends: tuple[RecordedEnd, ...] = ()


@dataclass(frozen=True)
class ReplayedSample:
    """The recorded and the replayed tokens of a sample. `place` is the index of the first difference, None if they are
    equal; `was` or `now` is None if that answer ends before. A sample with `is_cut` was ended from outside and is
    compared up to that end.
    """

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
    """The result of replaying requests: the recorded steps, each sample, and notes on deviations."""

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
        """Return the fields as plain values for JSON."""
        steps = [{"step": each.step, "spans": [span._asdict() for span in each.spans]} for each in self.steps]
        samples = [{**asdict(each), "text": str(each)} for each in self.samples]
        return {"id": self.request_id, "identical": self.identical, "steps": steps, "requests": samples,
                "remarks": list(self.remarks)}  # fmt: skip


def request_of(sequence: str) -> str:
    """Return the id of the request to which a sequence belongs, as a sample or as a second stream."""
    return sequence.partition("#")[0].partition("+second")[0]


def neighbours_of(asked: Collection[str], steps: Iterable[StepPlanned]) -> set[str]:
    """Return the ids of requests that shared a step with one of the requests `asked`, without these."""
    shared = [{request_of(span.sequence) for span in step.spans} for step in steps]
    return {name for names in shared if not names.isdisjoint(asked) for name in names} - {*asked}


class _RecordedSpans:
    """A policy that gives each sequence of a step its recorded span.

    A sequence with more computed tokens than the start of its next span was preempted in the record, and is preempted
    now; a sequence with fewer computed tokens gets turns first.
    """

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
        requests = {request_of(span.sequence) for span in self.spans}  # a second stream: its first stream restarts it
        return SchedulerDecision(
            order or [each for each in entries.values() if request_of(each.request_id) in requests], preempted=back
        )


class ReplayWork:
    """A replay in progress: call `step` until it returns False, then `result`. Use it from one thread at a time.

    Args:
        config: config of the engine that served the requests.
        served: recorded requests by id; the requests of `asked` and their neighbours are run.
        steps: recorded steps of that engine, in order.
        asked: ids of the requests to replay.
        model: the model of `config`.
        name: name of the replay in messages; default: the first id of `asked`.

    Raises:
        WorkbenchError: for requests without a recorded step, and for unfinished requests.
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
        self._before: Counter[str] = Counter()  # number of tokens computed beforehand, by sequence
        self._otherwise: list[str] = []  # descriptions of spans that differ from the record
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
        for each in self.served.values():  # in order of arrival, the order of spans in a step
            runner.submit(each.request, self._queue)
        runner.core.wait_for_grammars()
        return runner

    def _pages(self, context: int) -> int:
        """Return the number of pages for all sequences that run at once, with the longest possible answers."""
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
        """Compute one step; return whether more steps may follow.

        Raises:
            WorkbenchError: if a recorded step cannot be formed.
        """
        return next(self._walk, False)

    def _walk_steps(self) -> Iterator[bool]:
        """Walk the recorded steps; yield after each computed step (a recorded step may need several)."""
        while self._coming:
            recorded, spans = self._coming.popleft()
            live, ids = self.runner.tracker.sequences, recorded.step
            self._policy.spans = left = [span for span in spans if span.sequence in live]
            self._otherwise += [f"step {ids}: {each.sequence} has ended" for each in spans if each.sequence not in live]
            idle = 0  # consecutive steps without a recorded sequence: one may preempt
            steps_left = sum(each.start + 4 for each in left)  # each step computes missing tokens
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
        """Compare a computed span with the recorded one: count missing tokens, or note a difference."""
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
        """Record the tokens of samples that have reached the length at which they were ended from outside."""
        for name, sequence in self.runner.tracker.sequences.items():
            if self._cuts.get(name) == len(sequence.output_ids):
                self._as_cut[name] = (*sequence.output_ids,)

    def _note(self, event: Event) -> None:
        if isinstance(event, StepPlanned):
            self._planned.extend(event.spans)
        elif isinstance(event, Finished):
            self._ends[event.request_id, event.sample] = event

    def run(self) -> RequestReplay:
        """Run all remaining steps and return the result."""
        while self.step():
            pass
        return self.result()

    def result(self) -> RequestReplay:
        """Return the result of the steps so far."""
        samples = [self._sample(name, end) for name, each in self.served.items() for end in sorted(each.ends)]
        samples.sort(key=lambda each: each.is_neighbour)
        return RequestReplay(self.name, tuple(each for each, _ in self.steps), tuple(samples), (*self._remarks(),))

    def _sample(self, name: str, recorded: RecordedEnd) -> ReplayedSample:
        end = self._ends.get((name, recorded.sample))
        was, now = recorded.token_ids, () if end is None else end.token_ids
        is_cut = recorded.reason not in OWN_END
        if is_cut:
            now = now[: len(was)]
            # A beam may have been cut during the search or at its end, when its text may be another beam's.
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
