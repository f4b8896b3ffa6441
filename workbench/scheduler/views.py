"""Show all sequences to a policy as read-only numbers, and count tokens by tenant.

Tokens are counted with the virtual counters of Sheng et al., "Fairness in Serving Large Language Models".
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Many
from types import MappingProxyType
from typing import Any, overload

from workbench.kv_cache.manager import KVCacheManager
from workbench.kv_cache.pages import NULL_PAGE
from workbench.kv_cache.prefix import PrefixMatch
from workbench.request import Sequence
from workbench.scheduler.plan import SchedulerLimits
from workbench.scheduler.policy import PagesByGroup, RequestView, SchedulerState, WaitingIndex

NUM_TOKENS_FIELD, IS_RUNNING_FIELD = (
    RequestView._fields.index("num_tokens"),
    RequestView._fields.index("is_running"),
)  # fields between them change every step


class TenantCounters:
    """Tokens computed for each tenant. A tenant that returns after an idle time is lifted to the least served of the
    others."""

    def __init__(self) -> None:
        self._ended: Counter[str] = Counter()  # tokens of finished sequences, and lifts on return
        self._live: Counter[str] = Counter()  # unfinished sequences
        self.returned: list[tuple[str, list[str]]] = []  # tenants that returned since the last step, with those present

    def add(self, tenant: str) -> None:
        """Count a new sequence of `tenant`."""
        if not self._live[tenant]:
            self.returned.append((tenant, [name for name, count in self._live.items() if count]))
        self._live[tenant] += 1

    def lift_returned(self, live: Iterable[Sequence]) -> None:
        """Lift the counters of tenants that returned; `live` are all unfinished sequences.

        Call it before a step is planned: while earlier steps run, their tokens are not known.
        """
        served = self.served_tokens(live)
        for tenant, others in self.returned:
            if others:
                self._ended[tenant] = max(self._ended[tenant], min(served[name] for name in others))
                served[tenant] = self._ended[tenant]
        self.returned.clear()

    def remove(self, sequence: Sequence) -> None:
        tenant = sequence.request.tenant
        self._ended[tenant] += sequence.computed_tokens
        self._live[tenant] -= 1

    def served_tokens(self, live: Iterable[Sequence]) -> Counter[str]:
        served = Counter[str]()
        dict.update(served, self._ended)  # a Counter's own goes through all it has
        here: dict[str, int] = {}
        for sequence in live:
            tenant = sequence.request.tenant
            here[tenant] = here.get(tenant, 0) + sequence.computed_tokens
        for tenant, tokens in here.items():
            served[tenant] += tokens
        return served


class _LazyValues(dict):
    """Values that are computed when first read."""

    def __init__(self, work: Callable[[str], Any]):
        super().__init__()
        self._work = work

    def __missing__(self, key: str) -> Any:
        value = self[key] = self._work(key)
        return value


class _Unseen(Many[RequestView]):
    """Views that are built when the first of them is read; valid as long as the state that they belong to."""

    def __init__(self, count: int, make: Callable[[], tuple[RequestView, ...]]):
        self._count, self._make = count, make
        self._made: tuple[RequestView, ...] | None = None

    def _entries(self) -> tuple[RequestView, ...]:
        if self._made is None:
            self._made = self._make()
        return self._made

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[RequestView]:
        return iter(self._entries())

    @overload
    def __getitem__(self, place: int) -> RequestView: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[RequestView, ...]: ...
    def __getitem__(self, place: int | slice) -> RequestView | tuple[RequestView, ...]:
        return self._entries()[place]


class RequestViews:
    """Views of sequences. Those of waiting sequences are kept from step to step, since nothing in them changes."""

    def __init__(self, kv_cache_manager: KVCacheManager, limits: SchedulerLimits, tenant_counters: TenantCounters):
        self.kv_cache_manager, self.limits, self.tenant_counters = kv_cache_manager, limits, tenant_counters
        self._queue = WaitingIndex()
        self._preempted: dict[int, Sequence] = {}  # waiting sequences with computed tokens, by arrival index
        self._constant_fields: dict[
            Sequence, tuple[tuple, tuple]
        ] = {}  # of running sequences: fields of their views that never change
        self.may_need_pages: set[Sequence] = set()  # running sequences that may need pages, as of the last state
        self._matches: dict[str, PrefixMatch] = {}
        self._pages_to_start: dict[str, list[int]] = {}
        self.num_admitted = 0
        self.num_decoding = 0  # running sequences with one token to compute, as of the last state

    def add_waiting(self, sequence: Sequence) -> None:
        self._queue.add(self._entry(sequence, is_running=False))
        self.drop_running(sequence)
        if sequence.computed_tokens:
            self._preempted[sequence.arrival_index] = sequence

    def drop_running(self, sequence: Sequence) -> None:
        self._constant_fields.pop(sequence, None)

    def remove_waiting(self, sequence: Sequence) -> None:
        self._queue.remove(sequence.arrival_index)
        self._preempted.pop(sequence.arrival_index, None)

    def update_waiting(self, sequence: Sequence) -> None:
        """Update a waiting sequence that has fewer children, or other pages."""
        self.remove_waiting(sequence)
        self.add_waiting(sequence)

    def prefix_match(self, sequence: Sequence) -> PrefixMatch:
        """Return the cached prefix of `sequence`, looked up once until pages change."""
        if sequence.request_id not in self._matches:
            self._matches[sequence.request_id] = self.kv_cache_manager.match_prefix(sequence)
        return self._matches[sequence.request_id]

    def pages_to_start(self, sequence: Sequence, match: PrefixMatch) -> list[int]:
        """Return the pages that `sequence` and its beams need to start, by cache group, counted once until pages
        change."""
        if sequence.request_id not in self._pages_to_start:
            lacks = self.kv_cache_manager.pages_to_start(sequence, match)
            for beam in sequence.children if sequence.beams else ():
                lacks = [
                    pages + more
                    for pages, more in zip(lacks, self.kv_cache_manager.pages_beyond_parent(beam), strict=True)
                ]
            self._pages_to_start[sequence.request_id] = lacks
        return self._pages_to_start[sequence.request_id]

    def invalidate_matches(self) -> None:
        """Drop cached lookups because pages change."""
        self._matches.clear()
        self._pages_to_start.clear()

    def state(
        self,
        step: int,
        running: list[Sequence],
        by_id: dict[str, Sequence],
        uncovered: Iterable[Sequence] | None = None,
        now: float = 0.0,
        seconds_per_prefill_token: float = 0.0,
    ) -> SchedulerState:
        """Return the state that a policy decides on.

        Args:
            uncovered: running sequences that may lack pages. Where it is given, entries of running requests are made
                when the policy first looks at one.
            now: seconds, the time of the step.
            seconds_per_prefill_token: as measured so far.
        """
        self.invalidate_matches()
        manager, limits = self.kv_cache_manager, self.limits
        entries: Many[RequestView]
        if uncovered is None:
            entries, uncovered = self._entries(running), self.may_need_pages
        else:
            entries = _Unseen(len(running), lambda: self._entries(running))
        free = [pool.num_available for pool in manager.pools]
        for sequence in uncovered:
            if missing := manager.pages_to_allocate(sequence):
                free = [pages - count for pages, count in zip(free, missing, strict=True)]
        served = _LazyValues(lambda tenant: total()[tenant])
        totals: list[Counter[str]] = []

        def total() -> Counter[str]:
            if not totals:
                totals.append(self.tenant_counters.served_tokens((*running, *self._preempted.values())))
            return totals[0]

        return SchedulerState(
            step, entries, self._queue.views(), tuple(free),
            pages_needed=MappingProxyType(_LazyValues(lambda name: self._needs(by_id[name]))),
            pages_released=MappingProxyType(_LazyValues(lambda name: self._gives(by_id[name]))),
            cached_tokens=MappingProxyType(_LazyValues(lambda name: self._cached(by_id[name]))),
            served_tokens=MappingProxyType(served), num_admitted=self.num_admitted,
            max_num_seqs=limits.max_num_seqs, max_num_batched_tokens=limits.max_num_batched_tokens,
            max_prefill_tokens=limits.max_prefill_tokens, whole_prefills=not limits.chunked_prefill,
            now=now, seconds_per_prefill_token=seconds_per_prefill_token, waiting_index=self._queue,
        )  # fmt: skip

    def _entries(self, running: list[Sequence]) -> tuple[RequestView, ...]:
        entries, fixed, evicts, new = [], self._constant_fields, self.kv_cache_manager.budget is not None, tuple.__new__
        self.may_need_pages.clear()
        self.num_decoding = 0
        if len(fixed) > len(running):
            self._constant_fields = fixed = {sequence: fixed[sequence] for sequence in running if sequence in fixed}
        for sequence in running:
            num_tokens, computed = len(sequence.token_ids), sequence.num_computed_tokens
            if num_tokens - sequence.num_evicted_tokens > sequence.allocated_until:
                self.may_need_pages.add(sequence)
            if evicts or sequence.children:
                entries.append(self._entry(sequence, True))
                continue
            if sequence not in fixed:
                entry = self._entry(sequence, True)
                fixed[sequence] = entry[:NUM_TOKENS_FIELD], entry[IS_RUNNING_FIELD:]
            head, tail = fixed[sequence]
            entries.append(new(RequestView, head + (num_tokens, computed, num_tokens - computed) + tail))
            self.num_decoding += num_tokens - computed == 1
        return tuple(entries)

    def _entry(self, sequence: Sequence, is_running: bool) -> RequestView:
        request, num_tokens, computed = sequence.request, len(sequence.token_ids), sequence.num_computed_tokens
        todo, num_children = num_tokens - computed, len(sequence.children)
        if self.kv_cache_manager.budget is not None:
            todo = self.kv_cache_manager.num_next_tokens(sequence, computed, sequence.num_evicted_tokens)
        if num_children and (shared := sequence.num_shared_by_children) is not None:  # the next child starts there,
            todo = max(1, shared - computed)  # which may be at once
        return RequestView(
            request.request_id, sequence.arrival_index, sequence.arrival_step, request.tenant, request.priority,
            len(request.prompt_ids), num_tokens, computed, todo, is_running, 1 + num_children,
            1 + num_children if sequence.beams else 1, sequence.num_preemptions, sequence.scheduled_step,
            sequence.arrival_time, request.sampling.max_output_tokens,
            request.sampling.max_output_tokens if request.predicted_tokens is None else request.predicted_tokens,
            math.inf if request.deadline is None else sequence.arrival_time + request.deadline,
            sequence.num_scored_rows is not None,
        )  # fmt: skip

    def _needs(self, sequence: Sequence) -> PagesByGroup:
        manager = self.kv_cache_manager
        if any(sequence.pages):
            return tuple(manager.pages_to_allocate(sequence) or [0] * len(manager.pools))
        offer = self.prefix_match(sequence)
        lacks = self.pages_to_start(sequence, offer)
        # Evictable pages of its own match count as available, but will not be.
        idle = [pool.num_available - manager.num_available(t, offer) for t, pool in enumerate(manager.pools)]
        return tuple(pages + kept for pages, kept in zip(lacks, idle, strict=True))

    def _gives(self, sequence: Sequence) -> PagesByGroup:
        return tuple(
            sum(page != NULL_PAGE and pool.ref_count(page) - pool.is_cached(page) == 1 for page in pages)
            + (len(sequence.states[t].all) if t in sequence.states else 0)
            for t, (pool, pages) in enumerate(zip(self.kv_cache_manager.pools, sequence.pages, strict=True))
        )

    def _cached(self, sequence: Sequence) -> int:
        return (
            sequence.swapped.num_computed_tokens
            if sequence.swapped is not None
            else self.prefix_match(sequence).num_tokens
        )
