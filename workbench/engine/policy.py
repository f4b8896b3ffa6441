"""What a scheduling policy sees and says: a pure function from a state to wishes. Integers and short strings only.

A policy of your own, in a file of your own (`schedule.policy: {path: mine.py:longest_first}`):

    from workbench.engine.policy import Wishes

    def longest_first(state):
        wishes, left = [], state.budget
        for entry in state.running:
            wishes.append((entry.id, min(entry.todo, left)))
            left -= wishes[-1][1]
        for entry in sorted(state.waiting, key=lambda entry: -entry.prompt):
            if left and state.fits(entry):
                wishes.append((entry.id, min(state.todo(entry), left)))
                break
        return Wishes(wishes)

`workbench.testing.check_policy` says whether it keeps the laws (this one lets short prompts starve).
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

Counts = tuple[int, ...]  # pages, one number a table


class Entry(NamedTuple):
    """One sequence in numbers."""

    id: str
    order: int  # of arrival: the oldest has the smallest
    since: int  # the step before which it came
    tenant: str
    priority: int  # the smaller, the sooner
    prompt: int  # tokens of its prompt
    known: int  # tokens known: the prompt's and those chosen so far
    computed: int  # of these, tokens whose keys and values stand in its pages
    todo: int  # tokens that a step could compute of it now; of one that waits, before `State.cached` is taken off
    runs: bool
    places: int = 1  # sequences that will run once it does: one a sample, or beam
    seats: int = 1  # of these, places that must be free for it to begin: all for beams, which go on together
    set_backs: int = 0
    began: int = 0  # the step in which it was last admitted, where it runs
    @property
    def decodes(self) -> bool:
        """Whether it runs and its prefill is done."""
        return self.runs and self.todo == 1


class WaitingOrders:
    """Entries that wait, in order of arrival and in the orders that policies asked for: who comes or goes is put into
    or taken out of each, and nothing is sorted anew."""

    MOST_KEYS = 4  # a policy that gives a new key every step has it sorted every step, and leaves nothing behind

    def __init__(self) -> None:
        self._arrival: list[Entry] = []
        self._orders: dict[Callable[[Entry], Any], list[Entry]] = {}
        self._tenants: dict[str, list[Entry]] = {}
        self._tuples: dict[Callable[[Entry], Any], tuple[Entry, ...]] = {}  # of both, until somebody comes or goes
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
        """The entry of this order of arrival."""
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
            if found != order:  # the key is not pure: this order is made anew when it is asked for
                del self._orders[key]

    def _changed(self) -> None:
        self._tuples.clear()
        self._by_tenant = None

    def entries(self) -> tuple[Entry, ...]:
        """In order of arrival; the same tuple until somebody comes or goes."""
        if _arrival not in self._tuples:
            self._tuples[_arrival] = tuple(self._arrival)
        return self._tuples[_arrival]

    def by(self, key: Callable[[Entry], Any]) -> tuple[Entry, ...]:
        """By `key`, then in order of arrival."""
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
        """Of each tenant, in order of arrival."""
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
    """What is to be decided on. Page counts and cached tokens are worked out when they are first asked for."""

    step: int
    running: Sequence[Entry]  # in order of arrival, as are those that wait
    waiting: tuple[Entry, ...]
    free: Counts  # pages that can be had once all that run have theirs: negative where pages will be lacking
    needs: Mapping[str, Counts]  # by id: pages it must be given before its next tokens are computed
    gives: Mapping[str, Counts]  # by id: pages that can be had once it is set back
    cached: Mapping[str, int]  # by id of one that waits: tokens found in the cache or on the host
    served: Mapping[str, int] = field(default_factory=dict)  # by tenant: tokens computed for it
    admitted: int = 0  # admissions so far, those after a set-back included
    max_num_seqs: int = 16
    budget: int = 512  # tokens of a step at most
    chunk: int = 512  # prefill tokens of a step at most
    whole: bool = False  # a prefill is not cut; one longer than a step is, after a set-back
    queue: WaitingOrders | None = field(default=None, compare=False, repr=False)  # as long as it is the scheduler's

    def by(self, key: Callable[[Entry], Any]) -> tuple[Entry, ...]:
        """Those that wait by `key`, and by arrival where that is equal. `key` is a pure function of the entry; give
        the same one every time (not a new lambda), and they are kept in this order from step to step."""
        if self.queue is None or self.queue.entries() is not self.waiting:
            return tuple(sorted(self.waiting, key=key))
        return self.queue.by(key)

    def tenants(self) -> Mapping[str, tuple[Entry, ...]]:
        """Those that wait, of each tenant in order of arrival."""
        if self.queue is None or self.queue.entries() is not self.waiting:
            return _tuples(_by_tenant(self.waiting))
        return self.queue.tenants()

    @property
    def places(self) -> int:
        """Sequences that may begin to run. One suffices for a request: samples that find none by the time they could
        join it wait on the pages of its prompt."""
        return self.max_num_seqs - sum([entry.places for entry in self.running])

    def fits(self, *entries: Entry) -> bool:
        """Whether there are pages for all of `entries`, which wait."""
        needed = [self.needs[entry.id] for entry in entries]
        return all(sum(column) <= free for column, free in zip(zip(*needed, strict=True), self.free, strict=False))

    def todo(self, entry: Entry) -> int:
        """Tokens to be computed of it, less those that are found in the cache or on the host."""
        return entry.todo if entry.runs else max(1, entry.todo - self.cached[entry.id])

    def portion(self, todo: int, left: int, chunk: int) -> int:
        """How much of `todo` prefill tokens a step computes with `left` of its budget, `chunk` of it for prefill."""
        length = max(0, min(todo, left, chunk))
        return 0 if self.whole and length < todo <= min(self.budget, self.chunk) else length

    def worked_out(self) -> State:
        """The same with everything worked out, in values that outlive the decision."""
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
    """`tokens` says of whom how many tokens are to be computed, in the order in which pages are given out; with none a
    running sequence pauses, and a waiting one is named as the next in line. Where the pages of those that run do not
    suffice, the last named gives way, and before it who is not named. Who waits is admitted in this order, until one
    does not fit. `set_back` are to give way whatever happens. `because` says of one that waits why, where it is the
    policy's doing.
    """

    tokens: Iterable[tuple[str, int]] = ()
    set_back: Iterable[str] = ()
    because: Mapping[str, str] = field(default_factory=dict)


class Policy(Protocol):
    """`steady = True` on it promises: where every running sequence wants one token, all have pages, and nobody could be
    admitted, it lets all decode. It is then not asked in such steps."""

    def __call__(self, state: State, /) -> Wishes: ...
