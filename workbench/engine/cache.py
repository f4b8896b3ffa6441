"""Bundle a runner's KV cache: the store with keys and values, the page manager, and CPU pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from workbench.cache.evict import evict_from
from workbench.cache.format import CacheFormat
from workbench.cache.holdings import Holdings
from workbench.cache.host import HostPages, carry_out, host_pages
from workbench.cache.pages import PagePool
from workbench.cache.prefix import PrefixIndex
from workbench.cache.settings import RadixPrefix, offload_from, prefix_from
from workbench.cache.store import KVStore
from workbench.cache.tables import tables_of
from workbench.engine.evicting import Evictor, check_evict
from workbench.engine.plan import StepPlan
from workbench.errors import WorkbenchError
from workbench.model.transformer import Transformer
from workbench.request import Sequence


@dataclass(frozen=True)
class Cache:
    store: KVStore
    holdings: Holdings
    host: HostPages | None
    evictor: Evictor | None

    @classmethod
    def of(
        cls,
        model: Transformer,
        chunk: int,
        clock: Callable[[], float],
        *,
        page_size: int,
        pages: int | tuple[int, ...],
        cache: CacheFormat | None,
        cache_dtype: torch.dtype | None,
        page_orders: tuple[list[int], ...] | None,
        prefix: Any,
        offload: Any,
        evict: Any,
        set_back: str = "auto",
    ) -> Cache:
        """Build the cache from the arguments of `Runner`; `max_chunk_tokens` is the most tokens that a step computes of
        one sequence."""
        shapes = model.cache_shapes(cache)
        tables = tables_of(shape.tables for shape in shapes)
        counts = (pages,) * len(tables) if isinstance(pages, int) else pages
        store = KVStore(shapes, counts, page_size, cache_dtype or model.dtype, str(model.device))
        orders = page_orders or (None,) * len(tables)
        pools = tuple(PagePool(count, page_size, order) for count, order in zip(counts, orders, strict=True))
        host = host_pages(store, offload_from(offload))
        rooms = host.rooms if host is not None else ()
        if set_back == "offload" and host is None:
            raise WorkbenchError("set_back: offload needs a place for the pages; set offload: memory")
        reuse = prefix_from(prefix)
        index = PrefixIndex(pools, store.tables, reuse.ttl, clock, rooms) if isinstance(reuse, RadixPrefix) else None
        policy, budget = evict_from(evict), None
        if policy is not None:
            check_evict(model.spec, store)
            if index is not None:
                told = "pages of sequences that lose tokens are nobody else's prefix; set prefix: off"
                raise WorkbenchError(f"cache.prefix radix with cache.evict: {told}")
            budget = policy.budget_for(page_size, sum(store.page_bytes(table) for table in range(len(tables))))
        evictor = None if policy is None else Evictor(policy, store)
        holdings = Holdings(pools, store.tables, chunk, index, rooms, budget, set_back != "recompute")
        return cls(store, holdings, host, evictor)

    def move(self, plan: StepPlan, running: Iterable[Sequence]) -> tuple[StepPlan, list[tuple[Sequence, str]]]:
        """Execute the plan's page transfers; return the plan without requests whose pages are lost, and
        their errors."""
        if not plan.moves:
            return plan, []
        if self.evictor is not None:
            self.evictor.carry_out(plan.moves.evictions)
        faults = carry_out(plan.moves, self.store, self.host)
        missing = {(table, page): faults[name] for name, table, _, page in plan.moves.loads if name in faults}
        broken = []
        for sequence in running if missing else ():
            mine = ((table, page) for table, pages in enumerate(sequence.pages) for page in pages)
            fault = next((missing[place] for place in mine if place in missing), None)
            if fault is not None:
                broken.append((sequence, fault))
        return plan.without([sequence for sequence, _ in broken]), broken

    def scrub(self, freed: list[list[int]]) -> None:
        """Zero the pages that a failed request freed, by cache group."""
        for table, pages in enumerate(freed):
            self.store.scrub(table, pages)

    def forget_prefixes(self) -> None:
        """Empty the prefix cache; running sequences keep their pages."""
        if self.holdings.prefix is not None:
            self.holdings.prefix.clear()
