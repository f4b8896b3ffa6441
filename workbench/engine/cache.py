"""Combine the parts of a runner's KV cache: the store of keys and values, the page manager, and CPU pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Protocol

import torch

from workbench.engine.config import EngineConfig
from workbench.errors import WorkbenchError
from workbench.executors.evicting import Evictor, why_not_evictable
from workbench.kv_cache.eviction import parse_eviction
from workbench.kv_cache.format import KVCacheSpec
from workbench.kv_cache.manager import KVCacheManager
from workbench.kv_cache.offload import CPUPageStore, open_offload, transfer_pages
from workbench.kv_cache.pages import PagePool, build_cache_groups
from workbench.kv_cache.prefix import RadixCache
from workbench.kv_cache.settings import RadixPrefixCache
from workbench.kv_cache.store import KVStore
from workbench.model.spec import ModelSpec
from workbench.model.transformer import Transformer
from workbench.request import Sequence
from workbench.scheduler.plan import StepPlan
from workbench.tensor_parallel.executor import TensorParallelStore
from workbench.tensor_parallel.transformer import TensorParallelTransformer

AUTO_CACHE_BYTES = 2**30  # maximum bytes of the cache when `pages` is auto


# Creates a store and its pools, given a function that builds a store of given page counts (by cache group) on a device.
BuildPages = Callable[[Callable[[tuple[int, ...], str], KVStore]], tuple[KVStore, tuple[PagePool, ...]]]


class Adoption(Protocol):
    """Pages that another engine computed, with which a new sequence of this engine starts."""

    def adopt(self, cache: KVCache, sequence: Sequence) -> None:
        """Give the pages to `sequence` before it is submitted; if they do not fit, it is computed again."""
        ...

    def decline(self, cache: KVCache) -> None:
        """Release the pages because the request ended before it started."""
        ...


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
        config: EngineConfig,
        clock: Callable[[], float],
        page_orders: tuple[list[int], ...] | None = None,
        build_pages: BuildPages | None = None,
        specs: tuple[KVCacheSpec, ...] | None = None,
    ) -> KVCache:
        """Build the cache that `config` describes, for `model`.

        Args:
            clock: returns seconds, for the lifetime of prefixes.
            page_orders: for each cache group, the order in which pages are first used.
            build_pages: creates the store and the pools; `cache.pages` is then not used.
            specs: cache specs of the layers, with calibrated codecs.
        """
        settings, page_size = config.cache, config.cache.page_size
        num_pages = cache_num_pages(model, config)
        groups = range(len(num_pages))
        orders = page_orders or (None,) * len(groups)
        if build_pages is None:
            store = build_store(model, config, num_pages, str(model.device), specs)
            pools = tuple(PagePool(count, page_size, order) for count, order in zip(num_pages, orders, strict=True))
        else:
            store, pools = build_pages(lambda totals, device: build_store(model, config, totals, device, specs))
        cpu_store, schedule = open_offload(store, settings.offload), config.schedule
        cpu_pools = cpu_store.cpu_pools if cpu_store is not None else ()
        if schedule.preemption_mode == "offload" and cpu_store is None:
            raise WorkbenchError("preemption_mode: offload needs a place for the pages; set offload: memory")
        index = None
        if isinstance(settings.prefix, RadixPrefixCache):
            prefix = settings.prefix
            shares = prefix.pinned_share, prefix.tenant_pinned_share
            index = RadixCache(pools, store.groups, prefix.ttl, clock, cpu_pools, *shares)
        policy, budget, evictor = parse_eviction(settings.evict), None, None
        if policy is not None:
            if why := why_not_evictable(model.spec, store, policy):
                raise WorkbenchError(f"cache.evict: {why}")
            budget = policy.budget_for(page_size, sum(store.page_bytes(group) for group in range(len(groups))))
            evictor = Evictor(policy, store, budget)
        manager = KVCacheManager(
            pools, store.groups, schedule.max_chunk_tokens, index, cpu_pools, budget, schedule.preemption_mode
        )
        return cls(store, manager, cpu_store, evictor)

    def transfer_pages(
        self, plan: StepPlan, running: Iterable[Sequence]
    ) -> tuple[StepPlan, list[tuple[Sequence, str]]]:
        """Execute the plan's page transfers. Return the plan without the requests that lost pages or failed to evict
        tokens, and the error of each of these requests.
        """
        if not plan.transfers:
            return plan, []
        broken = [] if self.evictor is None else self.evictor.evict(plan.transfers.evictions)
        faults = transfer_pages(plan.transfers, self.store, self.cpu_store)
        missing = {(table, page): faults[name] for name, table, _, page in plan.transfers.swap_ins if name in faults}
        for sequence in running if missing else ():
            used_pages = ((table, page) for table, pages in enumerate(sequence.pages) for page in pages)
            fault = next((missing[place] for place in used_pages if place in missing), None)
            if fault is not None:
                broken.append((sequence, fault))
        return plan.without([sequence for sequence, _ in broken]), broken

    def keep_path(self, sequence: Sequence, first: int, rows: Many[int]) -> None:
        """Move the keys and values of a draft tree's accepted tokens to their positions in the text.

        Args:
            sequence: the sequence, with the pages of the step.
            first: the slot of the first draft token; the i-th has slot `first` + i.
            rows: indices of the accepted tokens in the draft, ascending.
        """
        moved = [(target, place) for target, place in enumerate(rows) if target != place]
        size = self.store.page_size
        for group, pages in enumerate(sequence.pages if moved else ()):
            (to, to_offset), (source, offset) = (
                zip(*((pages[slot // size], slot % size) for slot in slots), strict=True)
                for slots in ([first + target for target, _ in moved], [first + place for _, place in moved])
            )
            for tensor in self.store.page_tensors(group):  # [page, kv_head, offset, head_dim]
                tensor[list(to), :, list(to_offset)] = tensor[list(source), :, list(offset)]

    def zero_pages(self, freed: list[list[int]]) -> None:
        """Fill the pages that a failed request freed, given by cache group, with zeros."""
        for table, pages in enumerate(freed):
            self.store.zero_pages(table, pages)

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache; running sequences keep their pages."""
        if self.manager.prefix_cache is not None:
            self.manager.prefix_cache.clear()


def build_store(
    model: Transformer,
    config: EngineConfig,
    num_pages: tuple[int, ...],
    device: str,
    specs: tuple[KVCacheSpec, ...] | None = None,
) -> KVStore:
    """Build the store that `config` describes, with `num_pages` pages by cache group. `specs` are the cache specs of
    the layers, with calibrated codecs.
    """
    shapes = specs or model.cache_shapes(config.cache)
    page_size, dtype = config.cache.page_size, config.cache_dtype(model.dtype)
    if isinstance(model, TensorParallelTransformer):
        return TensorParallelStore(model.ranks, shapes, num_pages, page_size, dtype, device)
    return KVStore(shapes, num_pages, page_size, dtype, device)


def cache_num_pages(model: Transformer, config: EngineConfig) -> tuple[int, ...]:
    """Return the number of pages of a runner's own cache, for each cache group."""
    shapes = model.cache_shapes(config.cache)
    if config.cache.pages != "auto":
        return (config.cache.pages,) * len(build_cache_groups(shape.cache_groups for shape in shapes))
    return auto_num_pages(config, shapes, model.spec, config.cache_dtype(model.dtype))


def auto_num_pages(
    config: EngineConfig, shapes: tuple[KVCacheSpec, ...], spec: ModelSpec, dtype: torch.dtype
) -> tuple[int, ...]:
    """Return the number of pages of each cache group that `max_num_seqs` sequences need, each with a full context (or a
    full window, or an eviction budget); limited to AUTO_CACHE_BYTES.
    """
    groups, page_size = build_cache_groups(shape.cache_groups for shape in shapes), config.cache.page_size
    limits, context = config.schedule, spec.max_position_embeddings
    page_bytes = [
        sum(shapes[layer].page_bytes(number, page_size, dtype) for layer in group.layers)
        for number, group in enumerate(groups)
    ]
    policy = parse_eviction(config.cache.evict)
    if policy is not None:
        context = policy.budget_for(page_size, round(sum(page_bytes))).peak_tokens(context, context)
    wanted = [limits.max_num_seqs * group.max_pages(context, limits.max_chunk_tokens, page_size) for group in groups]
    whole = sum(pages * each for pages, each in zip(wanted, page_bytes, strict=True))
    return tuple(max(1, min(pages, int(pages * AUTO_CACHE_BYTES // whole))) for pages in wanted)
