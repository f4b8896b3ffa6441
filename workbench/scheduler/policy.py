"""Define the input and output of a scheduling policy: a pure function from a state to an order of requests. The state
has numbers and short strings only, the time of the step included, so that a decision can be repeated.

A user-defined policy in a separate file (`schedule.policy: {path: mine.py:longest_first}`):

    from workbench.scheduler.policy import SchedulerDecision

    def longest_first(state):
        waiting = sorted(state.waiting, key=lambda request: -request.num_prompt_tokens)
        return SchedulerDecision([state.decodes, state.prefills, waiting])

`workbench.testing.check_policy` checks it against the laws (this one lets short prompts starve). Building blocks of
policies are in `workbench.scheduler.ordering`.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, overload

from workbench.scheduler.limits import SchedulerLimits

PagesByGroup = tuple[int, ...]  # numbers of pages by cache group


class RequestView(NamedTuple):
    """A read-only view of one sequence, in numbers."""

    request_id: str
    arrival_index: int  # order of arrival: the oldest has the smallest
    arrival_step: int  # the first step after its arrival
    tenant: str
    priority: int  # smaller values go first
    num_prompt_tokens: int  # number of prompt tokens
    num_tokens: int  # number of known tokens: prompt and output
    num_computed_tokens: int  # number of known tokens with keys and values in its pages
    num_new_tokens: int  # number of tokens to compute now; for a waiting request, cached tokens included
    is_running: bool
    num_sequences: int = 1  # number of its sequences: one per sample or beam
    slots_needed: int = 1  # free slots needed to start: one per beam, since beams advance together
    num_preemptions: int = 0
    scheduled_step: int = 0  # the step in which it was last admitted, if it runs
    arrival_time: float = 0.0  # seconds, on the clock of `SchedulerState.now`
    max_tokens: int = 0  # maximum number of output tokens
    predicted_tokens: int = 0  # predicted number of output tokens; `max_tokens` without a prediction
    deadline: float = math.inf  # deadline of its last token, in seconds on the same clock
    scores_prompt: bool = False  # whether it wants prompt log-probabilities: a step has few such tokens

    @property
    def is_decoding(self) -> bool:
        """Return whether it runs and its last known token is the only one to compute."""
        return self.is_running and self.num_tokens - self.num_computed_tokens == 1


class RunningViews(Sequence[RequestView]):
    """The views of running sequences, each created on access; they are valid while the step is planned.

    `parts` are the views of decoding sequences, and of all other running sequences.
    """

    def __init__(
        self,
        sequences: Sequence[Any],
        view: Callable[[Any], RequestView],
        parts: tuple[RunningViews, RunningViews] | None = None,
    ):
        self.sequences, self.parts, self._view = sequences, parts, view

    def __len__(self) -> int:
        return len(self.sequences)

    def __iter__(self) -> Iterator[RequestView]:
        return map(self._view, self.sequences)

    @overload
    def __getitem__(self, place: int) -> RequestView: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[RequestView, ...]: ...
    def __getitem__(self, place: int | slice) -> RequestView | tuple[RequestView, ...]:
        sequences = self.sequences[place]
        return tuple(map(self._view, sequences)) if isinstance(place, slice) else self._view(sequences)


class WaitingIndex:
    """The waiting requests, in order of arrival and in each order that a policy has requested. Arrivals and departures
    update an order without a new sort.
    """

    MAX_SORT_KEYS = 4  # a policy with a new key in every step sorts in every step, and old orders are dropped

    def __init__(self) -> None:
        self._arrival: list[RequestView] = []
        self._orders: dict[Callable[[RequestView], Any], list[RequestView]] = {}
        self._tenants: dict[str, list[RequestView]] = {}
        # cached views of each order, until a request arrives or leaves
        self._tuples: dict[Callable[[RequestView], Any], tuple[RequestView, ...]] = {}
        self._by_tenant: Mapping[str, tuple[RequestView, ...]] | None = None

    def add(self, entry: RequestView) -> None:
        self._changed()
        bisect.insort(self._arrival, entry, key=_arrival)
        bisect.insort(self._tenants.setdefault(entry.tenant, []), entry, key=_arrival)
        for key, entries in [*self._orders.items()]:
            try:
                bisect.insort(entries, entry, key=_and_arrival(key))
            except Exception:  # a user's key: its error is raised when a policy uses this order, not in `submit`
                del self._orders[key]

    def remove(self, order: int) -> None:
        """Remove the request whose arrival index is `order`."""
        self._changed()
        place = bisect.bisect_left(self._arrival, order, key=_arrival)
        entry = self._arrival.pop(place)
        queue = self._tenants[entry.tenant]
        del queue[bisect.bisect_left(queue, order, key=_arrival)]
        if not queue:
            del self._tenants[entry.tenant]
        for key, entries in [*self._orders.items()]:
            try:
                place = bisect.bisect_left(entries, (key(entry), order), key=_and_arrival(key))
                removed = entries.pop(place).arrival_index
            except Exception:  # as in `add`; an IndexError too
                removed = None
            if removed != order:  # the key is not pure: rebuild this order when needed
                del self._orders[key]

    def _changed(self) -> None:
        self._tuples.clear()
        self._by_tenant = None

    def views(self) -> tuple[RequestView, ...]:
        """Return the views of waiting requests in order of arrival; it is the same tuple until a request arrives or
        leaves.
        """
        if _arrival not in self._tuples:
            self._tuples[_arrival] = tuple(self._arrival)
        return self._tuples[_arrival]

    def sorted_by(self, key: Callable[[RequestView], Any]) -> tuple[RequestView, ...]:
        """Return the views of waiting requests sorted by `key`, then by arrival."""
        if key not in self._orders:
            while len(self._orders) >= self.MAX_SORT_KEYS:
                oldest = next(iter(self._orders))
                del self._orders[oldest]
                self._tuples.pop(oldest, None)
            self._orders[key] = sorted(self._arrival, key=key)
        if key not in self._tuples:
            self._tuples[key] = tuple(self._orders[key])
        return self._tuples[key]

    def by_tenant(self) -> Mapping[str, tuple[RequestView, ...]]:
        """Return the views of waiting requests in order of arrival, by tenant."""
        if self._by_tenant is None:
            self._by_tenant = _tuples(self._tenants)
        return self._by_tenant


def _arrival(entry: RequestView) -> int:
    return entry.arrival_index


def _and_arrival(key: Callable[[RequestView], Any]) -> Callable[[RequestView], Any]:
    return lambda entry: (key(entry), entry.arrival_index)


def _tuples(lists: Mapping[str, list[RequestView]]) -> Mapping[str, tuple[RequestView, ...]]:
    return MappingProxyType({name: tuple(entries) for name, entries in lists.items()})


def _by_tenant(entries: Iterable[RequestView]) -> dict[str, list[RequestView]]:
    queues: dict[str, list[RequestView]] = {}
    for entry in entries:
        queues.setdefault(entry.tenant, []).append(entry)
    return queues


@dataclass(frozen=True)
class SchedulerState:
    """The scheduler's state before a step. Page counts and cached tokens are computed when first read."""

    step: int
    running: Sequence[RequestView]  # running requests in order of arrival
    waiting: tuple[RequestView, ...]  # waiting requests in order of arrival
    free_pages: PagesByGroup  # available pages after the needs of all running sequences; negative if too few
    pages_needed: Mapping[str, PagesByGroup]  # by request id: pages to allocate before its next tokens
    pages_released: Mapping[str, PagesByGroup]  # by request id: pages that its preemption frees
    cached_tokens: Mapping[str, int]  # by id of a waiting request: its tokens in the prefix cache or on the CPU
    served_tokens: Mapping[str, int] = field(default_factory=dict)  # number of computed tokens by tenant
    num_admitted: int = 0  # number of admissions so far, those after preemption included
    limits: SchedulerLimits = (
        SchedulerLimits()
    )  # limits of the step; without chunked prefill, a prompt longer than a step is cut
    now: float = 0.0  # time in seconds, the same for the whole step
    seconds_per_prefill_token: float = 0.0  # mean of the steps so far, decodes included; 0 before a measurement
    waiting_index: WaitingIndex | None = field(default=None, compare=False, repr=False)  # None in a materialized copy

    def waiting_by(self, key: Callable[[RequestView], Any]) -> tuple[RequestView, ...]:
        """Return the waiting requests sorted by `key`, then by arrival.

        `key` is a pure function of the view. Pass the same function every time, not a new lambda, so that the order is
        kept between steps.
        """
        if self.waiting_index is None or self.waiting_index.views() is not self.waiting:
            return tuple(sorted(self.waiting, key=key))
        return self.waiting_index.sorted_by(key)

    def waiting_by_tenant(self) -> Mapping[str, tuple[RequestView, ...]]:
        """Return each tenant's waiting requests in order of arrival."""
        if self.waiting_index is None or self.waiting_index.views() is not self.waiting:
            return _tuples(_by_tenant(self.waiting))
        return self.waiting_index.by_tenant()

    @property
    def decodes(self) -> Sequence[RequestView]:
        """Return the running requests that decode, in order of arrival."""
        if type(self.running) is RunningViews and self.running.parts is not None:
            return self.running.parts[0]
        return tuple([entry for entry in self.running if entry.is_decoding])

    @property
    def prefills(self) -> Sequence[RequestView]:
        """Return the running requests that do not decode, in order of arrival."""
        if type(self.running) is RunningViews and self.running.parts is not None:
            return self.running.parts[1]
        return tuple([entry for entry in self.running if not entry.is_decoding])

    @property
    def free_slots(self) -> int:
        """Return the number of sequences that may start to run.

        One free slot is enough for a request: samples without a slot wait on the pages of its prompt.
        """
        return self.limits.max_num_seqs - sum([entry.num_sequences for entry in self.running])

    def fits(self, entry: RequestView, preempted: Iterable[RequestView] = ()) -> bool:
        """Return whether enough pages are available for a waiting request once `preempted` are preempted."""
        freed = [self.pages_released[each.request_id] for each in preempted]
        room = [sum(pages) for pages in zip(self.free_pages, *freed, strict=True)]
        return all(pages <= free for pages, free in zip(self.pages_needed[entry.request_id], room, strict=True))

    def num_new_tokens(self, entry: RequestView) -> int:
        """Return the number of tokens to compute for a request, without those in the prefix cache or on the CPU."""
        return (
            entry.num_new_tokens
            if entry.is_running
            else max(1, entry.num_new_tokens - self.cached_tokens[entry.request_id])
        )

    def materialize(self) -> SchedulerState:
        """Return a copy with all values computed, which stays valid after the decision."""
        every = (*self.running, *self.waiting)
        return replace(
            self,
            running=tuple(self.running),
            pages_needed={entry.request_id: self.pages_needed[entry.request_id] for entry in every},
            pages_released={entry.request_id: self.pages_released[entry.request_id] for entry in self.running},
            cached_tokens={entry.request_id: self.cached_tokens[entry.request_id] for entry in self.waiting},
            served_tokens={tenant: self.served_tokens[tenant] for tenant in {entry.tenant for entry in every}},
            waiting_index=None,
        )


class Turn(NamedTuple):
    """A request's turn to be served, with at most `max_tokens` tokens. The request may have another turn later in the
    order.
    """

    request: RequestView
    max_tokens: int


Order = Iterable[RequestView | Turn | Iterable[RequestView | Turn]]


@dataclass(frozen=True)
class SchedulerDecision:
    """A policy's decision for one step: an order of requests, the requests to preempt, and reasons.

    `order` has the requests to serve, running and waiting; an item is a request, a `Turn`, or a group of these such as
    `state.decodes`. The scheduler walks it once, no further than needed, and gives each request as many tokens as the
    step's tokens, slots and pages allow. Waiting requests start in this order until one cannot. Running requests that
    are not in the order pause; if no request advances, all decoding requests get a turn, or if there are none, all
    running requests.

    `keep` has the running requests in the order in which they keep their pages (default: order of arrival). It is used
    if pages run out: requests that are not in it are preempted first, then its last ones. `preempted` are preempted in
    any case, and get no turn in this step. `reasons`, by request id, hold back waiting requests.
    """

    order: Order = ()
    keep: Iterable[RequestView] | None = None
    preempted: Iterable[RequestView] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)


class SchedulingPolicy(Protocol):
    """A function from `SchedulerState` to `SchedulerDecision`.

    `steady = True` guarantees: if every running sequence needs one token, all have pages and none can be admitted, the
    policy lets all decode. It is not called in such steps.

    `gives_up` is a set of names of laws in `workbench.testing.check_policy` that the policy breaks on purpose. The
    report lists them as given up.
    """

    def __call__(self, state: SchedulerState, /) -> SchedulerDecision: ...
