"""Build a policy's read-only views of all sequences, and count tokens by tenant.

Tokens are counted with the virtual counters of Sheng et al., "Fairness in Serving Large Language Models".
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from types import MappingProxyType
from typing import Any

from workbench.kv_cache.manager import KVCacheManager
from workbench.kv_cache.pages import NULL_PAGE
from workbench.kv_cache.prefix import PrefixMatch
from workbench.request import Sequence
from workbench.scheduler.limits import SchedulerLimits
from workbench.scheduler.policy import PagesByGroup, RequestView, RunningViews, SchedulerState, WaitingIndex

# Fields from the first name up to (not including) the second change in every step.
NUM_TOKENS_FIELD, IS_RUNNING_FIELD = RequestView._fields.index("num_tokens"), RequestView._fields.index("is_running")


class TenantCounters:
    """The number of tokens computed for each tenant. The counter of a tenant that returns after idle time is raised to
    the minimum of the other tenants' counters.
    """

    def __init__(self) -> None:
        self._ended: Counter[str] = Counter()  # tokens of finished sequences, plus raises on return
        self._live: Counter[str] = Counter()  # unfinished sequences
        self.returned: list[tuple[str, list[str]]] = []  # tenants that returned since the last step, and present ones

    def add(self, tenant: str) -> None:
        """Register a new sequence of `tenant`."""
        if not self._live[tenant]:
            self.returned.append((tenant, [name for name, count in self._live.items() if count]))
        self._live[tenant] += 1

    def lift_returned(self, live: Iterable[Sequence]) -> None:
        """Raise the counters of tenants that returned; `live` are all unfinished sequences.

        Call it before a step is planned: the tokens of a step are only known after it.
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
        dict.update(served, self._ended)  # Counter's own operator would visit all tenants
        unfinished: dict[str, int] = {}
        for sequence in live:
            tenant = sequence.request.tenant
            unfinished[tenant] = unfinished.get(tenant, 0) + sequence.computed_tokens
        for tenant, tokens in unfinished.items():
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


class RequestViews:
    """A policy's views of all sequences. Views of waiting sequences are stored between steps, since they do not
    change.
    """

    def __init__(self, kv_cache_manager: KVCacheManager, limits: SchedulerLimits, tenant_counters: TenantCounters):
        self.kv_cache_manager, self.limits, self.tenant_counters = kv_cache_manager, limits, tenant_counters
        self._queue = WaitingIndex()
        self._preempted: dict[int, Sequence] = {}  # waiting sequences with computed tokens, by arrival index
        self._constant_fields: dict[Sequence, tuple[tuple, tuple]] = {}  # fields of views of running sequences
        self._matches: dict[str, PrefixMatch] = {}
        self._pages_to_start: dict[str, list[int]] = {}
        self.num_admitted = 0

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
        """Update the view of a waiting sequence whose children or pages have changed."""
        self.remove_waiting(sequence)
        self.add_waiting(sequence)

    def prefix_match(self, sequence: Sequence) -> PrefixMatch:
        """Return the cached prefix of `sequence`; the result is stored until pages change."""
        if sequence.request_id not in self._matches:
            self._matches[sequence.request_id] = self.kv_cache_manager.match_prefix(sequence)
        return self._matches[sequence.request_id]

    def pages_to_start(self, sequence: Sequence, match: PrefixMatch) -> list[int]:
        """Return the number of pages, by cache group, that `sequence` and its beams need to start; the result is stored
        until pages change.
        """
        if sequence.request_id not in self._pages_to_start:
            needed = self.kv_cache_manager.pages_to_start(sequence, match)
            for beam in sequence.children if sequence.beams else ():
                more = self.kv_cache_manager.pages_beyond_parent(beam)
                needed = [pages + others for pages, others in zip(needed, more, strict=True)]
            self._pages_to_start[sequence.request_id] = needed
        return self._pages_to_start[sequence.request_id]

    def invalidate_matches(self) -> None:
        """Drop stored prefix matches and page counts, because pages change."""
        self._matches.clear()
        self._pages_to_start.clear()

    def state(
        self,
        step: int,
        running: tuple[list[Sequence], list[Sequence], list[Sequence]],
        reserved_pages: list[int],
        by_id: dict[str, Sequence],
        now: float = 0.0,
        seconds_per_prefill_token: float = 0.0,
    ) -> SchedulerState:
        """Return the state for a policy's decision.

        Args:
            step: number of the step.
            running: running sequences: decoding ones, and the others.
            reserved_pages: number of pages that running sequences still need, by cache group.
            by_id: sequences that a policy may name, by id.
            now: the time of the step in seconds.
            seconds_per_prefill_token: the measurement so far.
        """
        self.invalidate_matches()
        sequences = [*running[0]]
        if len(self._constant_fields) > len(sequences):
            self._constant_fields = {s: self._constant_fields[s] for s in sequences if s in self._constant_fields}
        parts = RunningViews(running[1], self._running_view), RunningViews(running[2], self._running_view)
        pools = self.kv_cache_manager.pools
        free_pages = tuple([pool.num_available - pages for pool, pages in zip(pools, reserved_pages, strict=True)])
        totals: list[Counter[str]] = []

        def served_tokens(tenant: str) -> int:
            if not totals:
                totals.append(self.tenant_counters.served_tokens((*sequences, *self._preempted.values())))
            return totals[0][tenant]

        return SchedulerState(
            step, RunningViews(sequences, self._running_view, parts), self._queue.views(), free_pages,
            pages_needed=MappingProxyType(_LazyValues(lambda name: self._pages_needed(by_id[name]))),
            pages_released=MappingProxyType(_LazyValues(lambda name: self._pages_released(by_id[name]))),
            cached_tokens=MappingProxyType(_LazyValues(lambda name: self._cached_tokens(by_id[name]))),
            served_tokens=MappingProxyType(_LazyValues(served_tokens)), num_admitted=self.num_admitted,
            limits=self.limits, now=now, seconds_per_prefill_token=seconds_per_prefill_token, waiting_index=self._queue,
        )  # fmt: skip

    def _running_view(self, sequence: Sequence) -> RequestView:
        if self.kv_cache_manager.budget is not None or sequence.children:
            return self._entry(sequence, True)
        fields = self._constant_fields.get(sequence)
        if fields is None:
            entry = self._entry(sequence, True)
            fields = self._constant_fields[sequence] = entry[:NUM_TOKENS_FIELD], entry[IS_RUNNING_FIELD:]
        num_tokens, computed = len(sequence.token_ids), sequence.num_computed_tokens
        counts = num_tokens, computed, num_tokens - computed
        return tuple.__new__(RequestView, fields[0] + counts + fields[1])

    def _entry(self, sequence: Sequence, is_running: bool) -> RequestView:
        request, num_tokens, computed = sequence.request, len(sequence.token_ids), sequence.num_computed_tokens
        new, num_children = num_tokens - computed, len(sequence.children)
        if self.kv_cache_manager.budget is not None:
            new = self.kv_cache_manager.num_new_tokens(sequence, computed, sequence.num_evicted_tokens)
        if num_children and (shared := sequence.num_shared_by_children) is not None:
            new = max(1, shared - computed)  # the next child starts there, maybe at once
        return RequestView(
            request.request_id, sequence.arrival_index, sequence.arrival_step, request.tenant, request.priority,
            len(request.prompt_ids), num_tokens, computed, new, is_running, 1 + num_children,
            1 + num_children if sequence.beams else 1, sequence.num_preemptions, sequence.scheduled_step,
            sequence.arrival_time, request.sampling.max_output_tokens,
            request.sampling.max_output_tokens if request.predicted_tokens is None else request.predicted_tokens,
            math.inf if request.deadline is None else sequence.arrival_time + request.deadline,
            sequence.num_scored_rows is not None,
        )  # fmt: skip

    def _pages_needed(self, sequence: Sequence) -> PagesByGroup:
        manager = self.kv_cache_manager
        if any(sequence.pages):
            return tuple(manager.pages_to_allocate(sequence) or [0] * len(manager.pools))
        match = self.prefix_match(sequence)
        needed = self.pages_to_start(sequence, match)
        # Evictable pages of its own match count as available, but will be in use once it starts.
        idle = [pool.num_available - manager.num_available(t, match) for t, pool in enumerate(manager.pools)]
        return tuple(pages + evictable for pages, evictable in zip(needed, idle, strict=True))

    def _pages_released(self, sequence: Sequence) -> PagesByGroup:
        return tuple(
            sum(page != NULL_PAGE and pool.ref_count(page) - pool.is_cached(page) == 1 for page in pages)
            + (len(sequence.states[t].all) if t in sequence.states else 0)
            for t, (pool, pages) in enumerate(zip(self.kv_cache_manager.pools, sequence.pages, strict=True))
        )

    def _cached_tokens(self, sequence: Sequence) -> int:
        return (
            sequence.swapped.num_computed_tokens
            if sequence.swapped is not None
            else self.prefix_match(sequence).num_tokens
        )
