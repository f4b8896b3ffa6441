"""Bundle a runner's KV cache: the store with keys and values, the page manager, and CPU pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from workbench.errors import WorkbenchError
from workbench.executors.evicting import Evictor, check_eviction
from workbench.kv_cache.eviction import parse_eviction
from workbench.kv_cache.format import CacheFormat
from workbench.kv_cache.manager import KVCacheManager
from workbench.kv_cache.offload import CPUPageStore, open_offload, transfer_pages
from workbench.kv_cache.pages import PagePool, build_cache_groups
from workbench.kv_cache.prefix import RadixCache
from workbench.kv_cache.settings import RadixPrefixCache, parse_offload, parse_prefix_cache
from workbench.kv_cache.store import KVStore
from workbench.model.transformer import Transformer
from workbench.request import Sequence
from workbench.scheduler.plan import StepPlan


@dataclass(frozen=True)
class KVCache:
    store: KVStore
    manager: KVCacheManager
    cpu_store: CPUPageStore | None
    evictor: Evictor | None

    @classmethod
    def build(
        cls,
        model: Transformer,
        max_chunk_tokens: int,
        clock: Callable[[], float],
        *,
        page_size: int,
        pages: int | tuple[int, ...],
        format: CacheFormat | None,
        cache_dtype: torch.dtype | None,
        page_orders: tuple[list[int], ...] | None,
        prefix: Any,
        offload: Any,
        evict: Any,
        preemption_mode: str = "auto",
    ) -> KVCache:
        """Build the cache from the arguments of `Runner`; `max_chunk_tokens` is the most tokens that a step computes of
        one sequence."""
        shapes = model.cache_shapes(format)
        tables = build_cache_groups(shape.cache_groups for shape in shapes)
        counts = (pages,) * len(tables) if isinstance(pages, int) else pages
        store = KVStore(shapes, counts, page_size, cache_dtype or model.dtype, str(model.device))
        orders = page_orders or (None,) * len(tables)
        pools = tuple(PagePool(count, page_size, order) for count, order in zip(counts, orders, strict=True))
        host = open_offload(store, parse_offload(offload))
        rooms = host.cpu_pools if host is not None else ()
        if preemption_mode == "offload" and host is None:
            raise WorkbenchError("preemption_mode: offload needs a place for the pages; set offload: memory")
        reuse = parse_prefix_cache(prefix)
        index = (
            RadixCache(pools, store.groups, reuse.ttl, clock, rooms) if isinstance(reuse, RadixPrefixCache) else None
        )
        policy, budget = parse_eviction(evict), None
        if policy is not None:
            check_eviction(model.spec, store)
            if index is not None:
                message = "pages of sequences that lose tokens cannot be shared; set prefix: off"
                raise WorkbenchError(f"cache.prefix radix with cache.evict: {message}")
            budget = policy.budget_for(page_size, sum(store.page_bytes(table) for table in range(len(tables))))
        evictor = None if policy is None else Evictor(policy, store)
        manager = KVCacheManager(
            pools, store.groups, max_chunk_tokens, index, rooms, budget, preemption_mode != "recompute"
        )
        return cls(store, manager, host, evictor)

    def transfer_pages(
        self, plan: StepPlan, running: Iterable[Sequence]
    ) -> tuple[StepPlan, list[tuple[Sequence, str]]]:
        """Execute the plan's page transfers; return the plan without requests whose pages are lost, and
        their errors."""
        if not plan.transfers:
            return plan, []
        if self.evictor is not None:
            self.evictor.evict(plan.transfers.evictions)
        faults = transfer_pages(plan.transfers, self.store, self.cpu_store)
        missing = {(table, page): faults[name] for name, table, _, page in plan.transfers.swap_ins if name in faults}
        broken = []
        for sequence in running if missing else ():
            mine = ((table, page) for table, pages in enumerate(sequence.pages) for page in pages)
            fault = next((missing[place] for place in mine if place in missing), None)
            if fault is not None:
                broken.append((sequence, fault))
        return plan.without([sequence for sequence, _ in broken]), broken

    def zero_pages(self, freed: list[list[int]]) -> None:
        """Zero the pages that a failed request freed, by cache group."""
        for table, pages in enumerate(freed):
            self.store.zero_pages(table, pages)

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache; running sequences keep their pages."""
        if self.manager.prefix_cache is not None:
            self.manager.prefix_cache.clear()
