"""Define what a scheduling policy sees and returns: a pure function from a state to a decision. Integers and short
strings only.

A user-defined policy, in a file of its own (`schedule.policy: {path: mine.py:longest_first}`):

    from workbench.scheduler.policy import SchedulerDecision

    def longest_first(state):
        scheduled, left = [], state.max_num_batched_tokens
        for view in state.running:
            scheduled.append((view.request_id, min(view.num_new_tokens, left)))
            left -= scheduled[-1][1]
        for view in sorted(state.waiting, key=lambda view: -view.num_prompt_tokens):
            if left and state.fits(view):
                scheduled.append((view.request_id, min(state.num_new_tokens(view), left)))
                break
        return SchedulerDecision(scheduled)

`workbench.testing.check_policy` checks it against the laws (this one lets short prompts starve).
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

Counts = tuple[int, ...]  # pages, one number per cache group


class Entry(NamedTuple):
    """A read-only view of one sequence, in numbers."""

    id: str
    order: int  # order of arrival: the oldest has the smallest
    since: int  # the step before which it arrived
    tenant: str
    priority: int  # the smaller, the sooner
    prompt: int  # tokens of its prompt
    known: int  # known tokens: prompt and output
    computed: int  # of these, tokens whose keys and values are in its pages
    todo: int  # tokens that a step could compute now; for a waiting request, before cached tokens are subtracted
    runs: bool
    places: int = 1  # sequences that it becomes: one per sample or beam
    seats: int = 1  # slots that must be free for it to start: one per beam, which advance together
    set_backs: int = 0
    began: int = 0  # the step in which it was last admitted, where it runs
    @property
    def decodes(self) -> bool:
        """Return whether it runs and its prefill is done."""
        return self.runs and self.todo == 1


class WaitingOrders:
    """Waiting requests in order of arrival and in the orders that policies asked for. Arrivals and departures update
    each order; nothing is sorted anew."""

    MOST_KEYS = 4  # a new key every step is sorted every step, and old orders are dropped

    def __init__(self) -> None:
        self._arrival: list[Entry] = []
        self._orders: dict[Callable[[Entry], Any], list[Entry]] = {}
        self._tenants: dict[str, list[Entry]] = {}
        self._tuples: dict[Callable[[Entry], Any], tuple[Entry, ...]] = {}  # of both, until a request arrives or leaves
        self._by_tenant: Mapping[str, tuple[Entry, ...]] | None = None

    def add(self, entry: Entry) -> None:
        self._changed()
        bisect.insort(self._arrival, entry, key=_arrival)
        bisect.insort(self._tenants.setdefault(entry.tenant, []), entry, key=_arrival)
        for key, entries in [*self._orders.items()]:
            try:
                bisect.insort(entries, entry, key=_and_arrival(key))
            except Exception:  # a user's key: it raises where the policy asks for this order, not in `submit`
                del self._orders[key]

    def remove(self, order: int) -> None:
        """Remove the request with this arrival index."""
        self._changed()
        place = bisect.bisect_left(self._arrival, order, key=_arrival)
        entry = self._arrival.pop(place)
        mine = self._tenants[entry.tenant]
        del mine[bisect.bisect_left(mine, order, key=_arrival)]
        if not mine:
            del self._tenants[entry.tenant]
        for key, entries in [*self._orders.items()]:
            try:
                place = bisect.bisect_left(entries, (key(entry), order), key=_and_arrival(key))
                found = entries.pop(place).order
            except Exception:  # as in `add`; an IndexError too
                found = None
            if found != order:  # the key is not pure: this order is rebuilt when needed
                del self._orders[key]

    def _changed(self) -> None:
        self._tuples.clear()
        self._by_tenant = None

    def entries(self) -> tuple[Entry, ...]:
        """Return the views in order of arrival; the same tuple until a request arrives or leaves."""
        if _arrival not in self._tuples:
            self._tuples[_arrival] = tuple(self._arrival)
        return self._tuples[_arrival]

    def by(self, key: Callable[[Entry], Any]) -> tuple[Entry, ...]:
        """Return the views sorted by `key`, then by arrival."""
        if key not in self._orders:
            while len(self._orders) >= self.MOST_KEYS:
                oldest = next(iter(self._orders))
                del self._orders[oldest]
                self._tuples.pop(oldest, None)
            self._orders[key] = sorted(self._arrival, key=key)
        if key not in self._tuples:
            self._tuples[key] = tuple(self._orders[key])
        return self._tuples[key]

    def tenants(self) -> Mapping[str, tuple[Entry, ...]]:
        """Return each tenant's views in order of arrival."""
        if self._by_tenant is None:
            self._by_tenant = _tuples(self._tenants)
        return self._by_tenant


def _arrival(entry: Entry) -> int:
    return entry.order


def _and_arrival(key: Callable[[Entry], Any]) -> Callable[[Entry], Any]:
    return lambda entry: (key(entry), entry.order)


def _tuples(lists: Mapping[str, list[Entry]]) -> Mapping[str, tuple[Entry, ...]]:
    return MappingProxyType({name: tuple(entries) for name, entries in lists.items()})


def _by_tenant(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        found.setdefault(entry.tenant, []).append(entry)
    return found


@dataclass(frozen=True)
class State:
    """The scheduler's state before a step. Page counts and cached tokens are computed when first read."""

    step: int
    running: Sequence[Entry]  # in order of arrival, as are those that wait
    waiting: tuple[Entry, ...]
    free: Counts  # pages available after all running sequences have theirs: negative if they run short
    needs: Mapping[str, Counts]  # by request id: pages to allocate before its next tokens
    gives: Mapping[str, Counts]  # by request id: pages that its preemption frees
    cached: Mapping[str, int]  # by id of a waiting request: tokens in the prefix cache or on the CPU
    served: Mapping[str, int] = field(default_factory=dict)  # computed tokens by tenant
    admitted: int = 0  # admissions so far, including those after preemption
    max_num_seqs: int = 16
    budget: int = 512  # the most tokens of a step
    chunk: int = 512  # the most prefill tokens of a step
    whole: bool = False  # prefills are not cut, except one longer than a step after a preemption
    queue: WaitingOrders | None = field(default=None, compare=False, repr=False)  # while it is the scheduler's

    def by(self, key: Callable[[Entry], Any]) -> tuple[Entry, ...]:
        """Return the waiting requests sorted by `key`, then by arrival.

        `key` is a pure function of the view. Pass the same function every time, not a new lambda, so that the order is
        kept from step to step.
        """
        if self.queue is None or self.queue.entries() is not self.waiting:
            return tuple(sorted(self.waiting, key=key))
        return self.queue.by(key)

    def tenants(self) -> Mapping[str, tuple[Entry, ...]]:
        """Return each tenant's waiting requests in order of arrival."""
        if self.queue is None or self.queue.entries() is not self.waiting:
            return _tuples(_by_tenant(self.waiting))
        return self.queue.tenants()

    @property
    def places(self) -> int:
        """Return the number of sequences that may start to run.

        One free slot is enough for a request: samples without a slot wait on the pages of its prompt.
        """
        return self.max_num_seqs - sum([entry.places for entry in self.running])

    def fits(self, *entries: Entry) -> bool:
        """Return whether there are pages for all of `entries`, which wait."""
        needed = [self.needs[entry.id] for entry in entries]
        return all(sum(column) <= free for column, free in zip(zip(*needed, strict=True), self.free, strict=False))

    def todo(self, entry: Entry) -> int:
        """Return the tokens to compute for a request, without those found in the prefix cache or on the CPU."""
        return entry.todo if entry.runs else max(1, entry.todo - self.cached[entry.id])

    def portion(self, todo: int, left: int, chunk: int) -> int:
        """Return how many of `num_new_tokens` prefill tokens a step computes.

        Args:
            num_new_tokens: prefill tokens to compute.
            tokens_left: tokens left of the step.
            prefill_tokens_left: prefill tokens left of the step.
        """
        length = max(0, min(todo, left, chunk))
        return 0 if self.whole and length < todo <= min(self.budget, self.chunk) else length

    def worked_out(self) -> State:
        """Return a copy with everything computed, in values that outlive the decision."""
        every = (*self.running, *self.waiting)
        return replace(
            self,
            running=tuple(self.running),
            needs={entry.id: self.needs[entry.id] for entry in every},
            gives={entry.id: self.gives[entry.id] for entry in self.running},
            cached={entry.id: self.cached[entry.id] for entry in self.waiting},
            served={tenant: self.served[tenant] for tenant in {entry.tenant for entry in every}},
            queue=None,
        )


@dataclass(frozen=True)
class Wishes:
    """A policy's decision for one step: tokens per request, requests to preempt, and reasons.

    `num_scheduled_tokens` are (request_id, tokens) in the order in which pages are allocated. With 0 tokens a running
    request pauses and a waiting one is named as next in line. If pages run out, requests that are not listed are
    preempted first, then the last in the list. Waiting requests are admitted in this order, until one does not fit.
    `preempted` are preempted in any case. `reasons` say why a waiting request was not scheduled by the policy.
    """

    tokens: Iterable[tuple[str, int]] = ()
    set_back: Iterable[str] = ()
    because: Mapping[str, str] = field(default_factory=dict)


class Policy(Protocol):
    """A function from `SchedulerState` to `SchedulerDecision`.

    `steady = True` is a promise: if every running sequence needs one token, all have pages and none can be admitted,
    the policy lets all decode. It is not called in such steps.
    """

    def __call__(self, state: State, /) -> Wishes: ...
