"""Follow one request through a fleet: the events emitted for each sample, and how it continues after a loss.

front: Submitted, Routed   replica 1: Prefilled, Decoded 0, 1, 2 | lost   replica 2: Prefilled, Decoded 3, 4, Finished
one stream: Submitted, Routed, Prefilled, Decoded 0, 1, 2, Moved, Routed, Prefilled, Decoded 3, 4, Finished
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from workbench.engine import inputs as intake
from workbench.engine.inputs import sample_id, split_samples
from workbench.engine.resume import why_not_resumable
from workbench.errors import WorkbenchError
from workbench.request import FinishReason, Request
from workbench.trace.events import (
    Cancelled,
    Decoded,
    Event,
    Finished,
    PinnedPrefix,
    Prefilled,
    PromptLogprob,
    Submitted,
)

MAX_LOSSES = 3  # default maximum of replicas that a request may lose before it fails


def resumed_sample(request: Request, number: int, generated_ids: Sequence[int]) -> Request:
    """Return the request that continues one sample of `request`.

    Each unfinished sample is resumed alone, since samples have different lengths. The new request's id is
    `request_id` for sample 0, and `request_id#number` for other samples.

    Args:
        request: the request as it was first submitted.
        number: the sample's number.
        generated_ids: the sample's tokens so far; an empty sequence starts it anew.

    Raises:
        WorkbenchError: for a request that cannot be resumed (see `why_not_resumable`), unless it has no tokens yet.
    """
    if generated_ids and (why := why_not_resumable(request)):
        raise WorkbenchError(f"request {request.request_id}: {why}")
    sample = split_samples(request)[number]
    assert sample.request_id == sample_id(request.request_id, number)
    return replace(sample, generated_ids=tuple(generated_ids))


def prompt_of(request: Request) -> tuple[int, ...]:
    """Return a request's prompt ids; empty for a request without any, which its replica will refuse."""
    ids = request.prompt_ids
    return ids if isinstance(ids, tuple) else tuple(ids) if isinstance(ids, list) else ()


@dataclass
class SampleState:
    """The events emitted so far for one sample, and its token counts, over all replicas that computed it.

    Counts `*_now` belong to the current replica, counts `past_*` to replicas that it left: by a planned move (its end
    there is `moved`, and its pages may follow) or by an unplanned one (`lose`).
    """

    number: int
    token_ids: list[int] = field(default_factory=list)
    is_submitted: bool = False
    is_finished: bool = False
    logprobs: list[PromptLogprob] = field(default_factory=list)  # prompt log-probabilities
    pinned: list[PinnedPrefix] = field(default_factory=list)
    logprobs_now: int = 0
    pins_now: int = 0
    cached_now: int | None = None
    computed_now: int = 0
    has_token_now: bool = False
    moved: Finished | None = None  # its end at the replica that handed it over to the current one
    past_cached: int = 0
    past_computed: int = 0
    past_written: int = 0
    first_token: float | None = None  # times
    last_token: float | None = None

    def lose(self) -> None:
        """Mark the work of the current replica as lost; its emitted events stay."""
        self.past_cached += self.cached_now or 0
        self.past_computed += self.computed_now
        self.cached_now, self.computed_now, self.has_token_now = None, 0, False
        self.logprobs_now, self.pins_now, self.moved = 0, 0, None

    def take(self, event: Event) -> Event | None:
        """Take the next event of the current replica; return the part that is new to the client, or None."""
        if self.is_finished and not isinstance(event, Cancelled):  # a cancel is of all samples
            return None
        match event:
            case Submitted():
                is_new, self.is_submitted = not self.is_submitted, True
                return event if is_new else None
            case Prefilled():
                return self._prefilled(event)
            case Decoded():
                return self._decoded(event)
            case Finished(reason=FinishReason.MOVED):
                return self._moved(event)
            case Finished():
                return self._finished(event)
        return event

    def _prefilled(self, event: Prefilled) -> Prefilled:
        if self.cached_now is None:
            self.cached_now = event.computed - event.tokens
        self.has_token_now &= self.computed_now > 0  # pages that did not arrive are computed again
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
        self.computed_now += self.has_token_now  # prefill's last position computes an attempt's first token
        self.has_token_now = True
        self.token_ids.append(event.token_id)
        self.first_token = event.time if self.first_token is None else self.first_token
        self.last_token = event.time
        return event

    def _moved(self, event: Finished) -> None:
        self.past_cached += event.cached_tokens if self.moved is None else 0
        self.past_computed += event.computed_tokens
        self.past_written += event.written_tokens
        # What the next replica has at its beginning came with the move, and is no hit of its prefix cache.
        self.cached_now, self.computed_now, self.has_token_now = 0, 0, True
        self.logprobs_now, self.pins_now = 0, 0
        self.moved, self.token_ids = event, [*event.token_ids]  # not every request has events of its tokens

    def _finished(self, event: Finished) -> Finished:
        self.is_finished = True
        if self.moved is not None:
            event = replace(
                event, cached_tokens=0, shared_pages=self.moved.shared_pages, pinned=self.moved.pinned,
                prompt_logprobs=self.moved.prompt_logprobs,
            )  # fmt: skip
        return replace(
            event,
            cached_tokens=event.cached_tokens + self.past_cached,
            computed_tokens=event.computed_tokens + self.past_computed,
            written_tokens=event.written_tokens + self.past_written,
            prompt_logprobs=event.prompt_logprobs or tuple(self.logprobs),
            pinned=event.pinned or tuple(self.pinned),
        )


class Attempt(NamedTuple):
    """The requests by which one waiting request is sent to a replica.

    Args:
        names: sample number by the request id that is sent; None if one id stands for all samples.
        requests: requests to send; empty if no sample can continue.
        lost: samples that cannot continue, with the error.
    """

    names: dict[str, int | None]
    requests: list[Request]
    lost: list[tuple[SampleState, str]]


@dataclass(eq=False)
class FleetRequest:
    """A request of a fleet, from its arrival until its last sample ends.

    `order` is the order of arrival; `replica` is the number of the replica that serves it now, 0 for none.
    `public`: the request id and sample number that its events name, for a sample that is served alone.
    """

    request: Request
    arrival: float
    order: int = 0
    replica: int = 0
    variant: str = ""
    losses: int = 0  # replicas that ended while serving it
    is_cancelling: bool = False
    pending_tokens: int = 0  # prompt and generated tokens sent to the replica and not yet reported as computed
    samples: list[SampleState] = field(default_factory=list)
    moved_from: int = 0
    move_reason: str = ""
    public: tuple[str, int] | None = None
    attempts: int = 0  # replicas that it was sent to, one after another
    is_decoding: bool = False  # at a replica that does not hand it over
    send_to: tuple[int, int] | None = None  # destination of its pages' bytes: slot, restart number of its process

    def __post_init__(self) -> None:
        count, ids = self.request.sampling.num_sequences, self.request.generated_ids
        self.samples = [SampleState(number, [*ids]) for number in range(count)]

    @property
    def name(self) -> str:
        return self.request.request_id

    def named(self, event: Event) -> Event:
        """Return `event` under the request id and sample number that the client knows."""
        name, number = self.public or (self.name, event.sample)
        return replace(event, request_id=name, sample=number)

    @property
    def unfinished(self) -> list[SampleState]:
        return [each for each in self.samples if not each.is_finished]

    @property
    def num_tokens(self) -> int:
        """Return the length in tokens of the longest sample: prompt and generated tokens."""
        return len(prompt_of(self.request)) + max(len(each.token_ids) for each in self.samples)

    def attempt(self) -> Attempt:
        """Return the requests to send to a replica now, so that each sample continues after its emitted tokens."""
        left = self.unfinished
        known = len(self.request.generated_ids)
        if len(left) == len(self.samples) and all(len(each.token_ids) == known for each in left):
            return Attempt({self.name: None}, [_due(self.request)], [])
        made = Attempt({}, [], [])
        for each in left:
            if each.token_ids and (why := why_not_resumable(self.request)):
                made.lost.append((each, f"its replica ended ({self.move_reason}); {why.split(';')[0]}"))
                continue
            sample = _due(resumed_sample(self.request, each.number, each.token_ids))
            made.names[sample.request_id] = each.number
            made.requests.append(sample)
        return made

    def lose(self, reason: str, is_planned: bool = False) -> None:
        """Note that the request has lost its replica, which ended; or, with `is_planned`, that it was taken from a
        leaving replica.
        """
        for each in self.unfinished:
            each.lose()
        self.losses += not is_planned
        self.moved_from, self.move_reason, self.replica, self.pending_tokens = self.replica, reason, 0, 0

    def why_given_up(self, max_losses: int) -> str:
        """Return why the request is not computed again: more than `max_losses` replicas ended while they served it, so
        it may be the cause. Empty if it is computed again.
        """
        words = f"{self.losses} replicas ended while they served it, the last one: {self.move_reason}"
        return words * (self.losses > max_losses)

    def end(self, sample: SampleState, now: float, reason: FinishReason, error: str = "") -> Finished:
        """End an unfinished sample that is at no replica; return its Finished event."""
        event = Finished(
            now, self.name, sample=sample.number, reason=str(reason), error=error, token_ids=tuple(sample.token_ids),
            prompt_tokens=len(prompt_of(self.request)),
        )  # fmt: skip
        ended = sample.take(event)
        assert isinstance(ended, Finished)
        return ended

    @property
    def all_names(self) -> set[str]:
        """Return all ids under which the request's samples may be sent to replicas."""
        return {sample_id(self.name, number) for number in range(len(self.samples))}


def _due(request: Request) -> Request:
    """Return a request that arrives now; an invalid arrival stays, and is refused."""
    return replace(request, arrival=0.0) if intake.arrival(request) == request.arrival else request
