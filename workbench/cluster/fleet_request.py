"""Follow one request through a fleet: what was emitted of each of its samples, and how it goes on after a loss.

front: Submitted, Routed   replica 1: Prefilled, Decoded 0, 1, 2 | lost   replica 2: Prefilled, Decoded 3, 4, Finished
one stream: Submitted, Routed, Prefilled, Decoded 0, 1, 2, Moved, Routed, Prefilled, Decoded 3, 4, Finished
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from workbench.engine.inputs import sample_id, split_samples
from workbench.engine.resume import why_not_resumable
from workbench.errors import WorkbenchError
from workbench.request import Request
from workbench.trace.events import Decoded, Event, Finished, PinnedPrefix, Prefilled, PromptLogprob, Submitted


def resumed_sample(request: Request, number: int, generated_ids: Sequence[int]) -> Request:
    """Return the request that goes on with one sample of `request`.

    Each sample is resumed alone, since they are at different places; those that finished are not resumed at all. Its
    id is `request_id` for sample 0, and `request_id#number` for others.

    Args:
        request: the request as it was first submitted.
        number: the sample.
        generated_ids: its tokens so far; none start it anew.

    Raises:
        WorkbenchError: for a request that cannot be resumed (see `why_not_resumable`), unless it has no tokens yet.
    """
    if generated_ids and (why := why_not_resumable(request)):
        raise WorkbenchError(f"request {request.request_id}: {why}")
    sample = split_samples(request)[number]
    assert sample.request_id == sample_id(request.request_id, number)
    return replace(sample, generated_ids=tuple(generated_ids))


@dataclass
class SampleState:
    """Keep what was emitted of one sample.

    The counts `*_now` are of the attempt under way, those of `lost_*` of the attempts before it.
    """

    number: int
    token_ids: list[int] = field(default_factory=list)
    is_finished: bool = False
    logprobs: list[PromptLogprob] = field(default_factory=list)  # of the prompt
    pinned: list[PinnedPrefix] = field(default_factory=list)
    logprobs_now: int = 0
    pins_now: int = 0
    cached_now: int | None = None
    computed_now: int = 0
    has_token_now: bool = False
    lost_cached: int = 0
    lost_computed: int = 0
    first_token: float | None = None  # times
    last_token: float | None = None

    def lose(self) -> None:
        """Note that the attempt under way is lost; what was emitted of it stays."""
        self.lost_cached += self.cached_now or 0
        self.lost_computed += self.computed_now
        self.cached_now, self.computed_now, self.has_token_now = None, 0, False
        self.logprobs_now, self.pins_now = 0, 0

    def take(self, event: Event) -> Event | None:
        """Take the next event of the attempt under way; return what is new of it to the sink, None for nothing."""
        match event:
            case Submitted():  # the front emitted it when the request arrived
                return None
            case Prefilled():
                return self._prefilled(event)
            case Decoded():
                return self._decoded(event)
            case Finished():
                return self._finished(event)
        return event

    def _prefilled(self, event: Prefilled) -> Prefilled:
        if self.cached_now is None:
            self.cached_now = event.computed - event.tokens
        self.computed_now += event.tokens
        logprobs = event.logprobs[max(0, len(self.logprobs) - self.logprobs_now) :]
        pinned = event.pinned[max(0, len(self.pinned) - self.pins_now) :]
        self.logprobs_now += len(event.logprobs)
        self.pins_now += len(event.pinned)
        self.logprobs += logprobs
        self.pinned += pinned
        return replace(event, logprobs=logprobs, pinned=pinned)

    def _decoded(self, event: Decoded) -> Decoded:
        assert event.index == len(self.token_ids), f"{event.request_id}: token {event.index} after {self.token_ids}"
        self.computed_now += self.has_token_now  # the first of an attempt comes of its prefill's last position
        self.has_token_now = True
        self.token_ids.append(event.token_id)
        self.first_token = event.time if self.first_token is None else self.first_token
        self.last_token = event.time
        return event

    def _finished(self, event: Finished) -> Finished:
        self.is_finished = True
        return replace(
            event,
            cached_tokens=event.cached_tokens + self.lost_cached,
            computed_tokens=event.computed_tokens + self.lost_computed,
            prompt_logprobs=event.prompt_logprobs or tuple(self.logprobs),
            pinned=event.pinned or tuple(self.pinned),
        )


class Attempt(NamedTuple):
    """Requests that are sent to a replica for one that waits.

    Args:
        names: by id on the way, the sample that it is; None for all samples together under one id.
        requests: to be sent; none where no sample can go on.
        lost: the samples that cannot go on, with the reason.
    """

    names: dict[str, int | None]
    requests: list[Request]
    lost: list[tuple[SampleState, str]]


@dataclass(eq=False)
class FleetRequest:
    """A request of a fleet, from its arrival at the front to its last end.

    `order` is that of arrival; `replica` serves it now, 0 where none does.
    """

    request: Request
    order: int
    arrival: float
    replica: int = 0
    variant: str = ""
    losses: int = 0  # replicas that ended while they served it
    is_cancelling: bool = False
    pending_tokens: int = 0  # of the prompt and what was generated: sent, and not known to be computed
    samples: list[SampleState] = field(default_factory=list)
    moved_from: int = 0
    move_reason: str = ""

    def __post_init__(self) -> None:
        count, ids = self.request.sampling.num_sequences, self.request.generated_ids
        self.samples = [SampleState(number, [*ids]) for number in range(count)]

    @property
    def name(self) -> str:
        return self.request.request_id

    @property
    def unfinished(self) -> list[SampleState]:
        return [each for each in self.samples if not each.is_finished]

    @property
    def num_tokens(self) -> int:
        """Return the tokens to compute before the next one, of the sample with the most."""
        prompt = self.request.prompt_ids
        known = len(prompt) if isinstance(prompt, tuple | list) else 0
        return known + max(len(each.token_ids) for each in self.samples)

    def attempt(self) -> Attempt:
        """Return how the request is to be sent now, after what was emitted of it."""
        left = self.unfinished
        known = len(self.request.generated_ids)
        if len(left) == len(self.samples) and all(len(each.token_ids) == known for each in left):
            whole = replace(self.request, arrival=0.0)
            return Attempt({self.name: None}, [whole], [])
        made = Attempt({}, [], [])
        for each in left:
            if each.token_ids and (why := why_not_resumable(self.request)):
                made.lost.append((each, why))
                continue
            sample = replace(resumed_sample(self.request, each.number, each.token_ids), arrival=0.0)
            made.names[sample.request_id] = each.number
            made.requests.append(sample)
        return made

    def lose(self, reason: str) -> None:
        """Note that its replica is lost, or hands it over."""
        for each in self.unfinished:
            each.lose()
        self.moved_from, self.move_reason, self.replica, self.pending_tokens = self.replica, reason, 0, 0

    @property
    def all_names(self) -> set[str]:
        """Return all ids under which a part of it may be on the way."""
        return {sample_id(self.name, number) for number in range(len(self.samples))}
