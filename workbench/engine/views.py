"""Show the scheduler's sequences to a policy as read-only numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Many
from types import MappingProxyType
from typing import Any, overload

from workbench.cache.holdings import Holdings
from workbench.cache.pages import NULL_PAGE
from workbench.cache.prefix import Offer
from workbench.engine.limits import Limits
from workbench.engine.policy import Counts, Entry, State, WaitingOrders
from workbench.engine.tenants import Tenants
from workbench.request import Sequence

KNOWN, RUNS = Entry._fields.index("known"), Entry._fields.index("runs")  # fields between them change every step


class _Worked(dict):
    """Values that are computed when first read."""

    def __init__(self, work: Callable[[str], Any]):
        super().__init__()
        self._work = work

    def __missing__(self, key: str) -> Any:
        value = self[key] = self._work(key)
        return value


class _Unseen(Many[Entry]):
    """Entries that are made when the first of them is looked at, while the state they are of lasts."""

    def __init__(self, count: int, make: Callable[[], tuple[Entry, ...]]):
        self._count, self._make = count, make
        self._made: tuple[Entry, ...] | None = None

    def _entries(self) -> tuple[Entry, ...]:
        if self._made is None:
            self._made = self._make()
        return self._made

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries())

    @overload
    def __getitem__(self, place: int) -> Entry: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Entry, ...]: ...
    def __getitem__(self, place: int | slice) -> Entry | tuple[Entry, ...]:
        return self._entries()[place]


class Views:
    """Views of sequences. Those of waiting sequences are kept from step to step, since nothing in them changes."""

    def __init__(self, holdings: Holdings, limits: Limits, tenants: Tenants):
        self.holdings, self.limits, self.tenants = holdings, limits, tenants
        self._queue = WaitingOrders()
        self._back: dict[int, Sequence] = {}  # waiting sequences with computed tokens, by arrival index
        self._fixed: dict[Sequence, tuple[tuple, tuple]] = {}  # of running sequences: fields of their views that stay
        self.uncovered: set[Sequence] = set()  # running sequences that may need pages, as of the last state
        self._offers: dict[str, Offer] = {}
        self._lacks: dict[str, list[int]] = {}
        self.admitted = 0
        self.decode = 0  # running sequences with one token to compute, as of the last state

    def waits(self, sequence: Sequence) -> None:
        self._queue.add(self._entry(sequence, runs=False))
        self.runs_no_more(sequence)
        if sequence.computed_tokens:
            self._back[sequence.order] = sequence

    def runs_no_more(self, sequence: Sequence) -> None:
        self._fixed.pop(sequence, None)

    def waits_no_more(self, sequence: Sequence) -> None:
        self._queue.remove(sequence.order)
        self._back.pop(sequence.order, None)

    def changed(self, sequence: Sequence) -> None:
        """Update a waiting sequence that has fewer children, or other pages."""
        self.waits_no_more(sequence)
        self.waits(sequence)

    def offer(self, sequence: Sequence) -> Offer:
        """Return the cached prefix of `sequence`, looked up once until pages change."""
        if sequence.request_id not in self._offers:
            self._offers[sequence.request_id] = self.holdings.match(sequence)
        return self._offers[sequence.request_id]

    def lacks(self, sequence: Sequence, offer: Offer) -> list[int]:
        """Return the pages that `sequence` and its beams need to start, by cache group, counted once until pages
        change."""
        if sequence.request_id not in self._lacks:
            lacks = self.holdings.lacks(sequence, offer)
            for mate in sequence.followers if sequence.mates else ():
                lacks = [pages + more for pages, more in zip(lacks, self.holdings.beyond(mate), strict=True)]
            self._lacks[sequence.request_id] = lacks
        return self._lacks[sequence.request_id]

    def forget_offers(self) -> None:
        """Drop cached lookups because pages change."""
        self._offers.clear()
        self._lacks.clear()

    def state(
        self,
        step: int,
        running: list[Sequence],
        by_id: dict[str, Sequence],
        uncovered: Iterable[Sequence] | None = None,
    ) -> State:
        """What a policy decides on. Where `uncovered` is given, those of `running` that may lack pages, entries of
        those that run are not made before the policy looks at one."""
        self.forget_offers()
        holdings, limits = self.holdings, self.limits
        entries: Many[Entry]
        if uncovered is None:
            entries, uncovered = self._entries(running), self.uncovered
        else:
            entries = _Unseen(len(running), lambda: self._entries(running))
        free = [pool.available for pool in holdings.pools]
        for sequence in uncovered:
            if missing := holdings.missing(sequence):
                free = [pages - count for pages, count in zip(free, missing, strict=True)]
        served = _Worked(lambda tenant: total()[tenant])
        totals: list[Counter[str]] = []

        def total() -> Counter[str]:
            if not totals:
                totals.append(self.tenants.served((*running, *self._back.values())))
            return totals[0]

        return State(
            step, entries, self._queue.entries(), tuple(free),
            needs=MappingProxyType(_Worked(lambda name: self._needs(by_id[name]))),
            gives=MappingProxyType(_Worked(lambda name: self._gives(by_id[name]))),
            cached=MappingProxyType(_Worked(lambda name: self._cached(by_id[name]))),
            served=MappingProxyType(served), admitted=self.admitted,
            max_num_seqs=limits.max_num_seqs, budget=limits.max_num_batched_tokens, chunk=limits.chunk,
            whole=not limits.chunked_prefill, queue=self._queue,
        )  # fmt: skip

    def _entries(self, running: list[Sequence]) -> tuple[Entry, ...]:
        entries, fixed, evicts, new = [], self._fixed, self.holdings.budget is not None, tuple.__new__
        self.uncovered.clear()
        self.decode = 0
        if len(fixed) > len(running):
            self._fixed = fixed = {sequence: fixed[sequence] for sequence in running if sequence in fixed}
        for sequence in running:
            known, computed = len(sequence.token_ids), sequence.computed
            if known - sequence.evicted > sequence.covered:
                self.uncovered.add(sequence)
            if evicts or sequence.followers:
                entries.append(self._entry(sequence, True))
                continue
            if sequence not in fixed:
                entry = self._entry(sequence, True)
                fixed[sequence] = entry[:KNOWN], entry[RUNS:]
            head, tail = fixed[sequence]
            entries.append(new(Entry, head + (known, computed, known - computed) + tail))
            self.decode += known - computed == 1
        return tuple(entries)

    def _entry(self, sequence: Sequence, runs: bool) -> Entry:
        request, known, computed = sequence.request, len(sequence.token_ids), sequence.computed
        todo, followers = known - computed, len(sequence.followers)
        if self.holdings.budget is not None:
            todo = self.holdings.next_tokens(sequence, computed, sequence.evicted)
        if followers:  # the next of them joins there, which may be at once
            todo = max(1, min(follower.joins for follower in sequence.followers) - computed)
        return Entry(
            request.request_id, sequence.order, sequence.since, request.tenant, request.priority,
            len(request.prompt_ids), known, computed, todo, runs, 1 + followers,
            1 + followers if sequence.mates else 1, sequence.set_backs, sequence.began,
        )  # fmt: skip

    def _needs(self, sequence: Sequence) -> Counts:
        holdings = self.holdings
        if any(sequence.pages):
            return tuple(holdings.missing(sequence) or [0] * len(holdings.pools))
        offer = self.offer(sequence)
        lacks = self.lacks(sequence, offer)
        # Evictable pages of its own match count as available, but will not be.
        idle = [pool.available - holdings.available(t, offer) for t, pool in enumerate(holdings.pools)]
        return tuple(pages + kept for pages, kept in zip(lacks, idle, strict=True))

    def _gives(self, sequence: Sequence) -> Counts:
        return tuple(
            sum(page != NULL_PAGE and pool.holders(page) - pool.kept(page) == 1 for page in pages)
            for pool, pages in zip(self.holdings.pools, sequence.pages, strict=True)
        )

    def _cached(self, sequence: Sequence) -> int:
        return sequence.saved.computed if sequence.saved is not None else self.offer(sequence).tokens
