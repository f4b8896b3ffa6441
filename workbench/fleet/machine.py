"""Specification of a simulated instance: cache, scheduler limits, step times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from workbench.cache.holdings import KVCacheManager
from workbench.cache.pages import PagePool
from workbench.cache.prefix import RadixCache
from workbench.cache.tables import KVCacheGroup
from workbench.engine.policy import SchedulingPolicy
from workbench.engine.scheduler import SchedulerLimits, Scheduler
from workbench.errors import WorkbenchError
from workbench.fleet.hardware import Hardware
from workbench.fleet.roofline import ModelSizes, roofline_step_times
from workbench.fleet.work import TICKS_PER_SECOND, StepTimeModel

RECEIVE_POOL_FACTOR = 16  # pages of the pool for received sequences, over pages of the cache


@dataclass(frozen=True)
class InstanceSpec:
    """A simulated instance's cache, limits and step times.

    `pages` and `page_bytes` are by page table. `receives_kv` tells whether sequences arrive from other instances with
    their pages. `swap_ticks_per_byte` is the cost of moving pages to and from CPU memory."""

    times: StepTimeModel
    tables: tuple[KVCacheGroup, ...]
    pages: tuple[int, ...]
    page_bytes: tuple[int, ...]
    page_size: int
    context: int
    limits: SchedulerLimits = SchedulerLimits()
    policy: SchedulingPolicy | None = None  # first come first served unless given
    prefix: bool = False
    ttl: float | None = None  # seconds that a cached prefix lives after its last use
    receives_kv: bool = False
    swap_ticks_per_byte: float = 0.0

    def make_scheduler(self, clock: Callable[[], float]) -> Scheduler:
        """Build a new scheduler with an empty cache."""
        pools = tuple(PagePool(pages, self.page_size) for pages in self.pages)
        rooms = tuple(PagePool(RECEIVE_POOL_FACTOR * pages, self.page_size) for pages in self.pages) if self.receives_kv else ()
        index = RadixCache(pools, self.tables, self.ttl, clock, rooms) if self.prefix else None
        holdings = KVCacheManager(pools, self.tables, self.limits.max_prefill_tokens, index, rooms)
        return Scheduler(holdings, self.limits, self.context, self.policy)

    @property
    def kv_bytes_per_token(self) -> float:
        return sum(self.page_bytes) / self.page_size


def instance_spec(
    sizes: ModelSizes,
    hardware: Hardware,
    limits: SchedulerLimits,
    *,
    gpus: int = 1,
    page_size: int = 64,
    memory_share: float = 0.9,
    cache_bytes: float | None = None,
    pages: int | None = None,
    context: int | None = None,
    prefix: bool = False,
    ttl: float | None = None,
    receives_kv: bool = False,
    times: StepTimeModel | None = None,
    policy: SchedulingPolicy | None = None,
) -> InstanceSpec:
    """Build the instance of `gpus` accelerators that serve a model.

    Page tables share the cache in the proportion in which full contexts need them.

    Args:
        sizes: Bytes of the model's weights and cache.
        hardware: One accelerator.
        limits: Limits of the scheduler.
        gpus: Number of accelerators.
        page_size: Tokens of a page.
        memory_share: Fraction of the memory for weights and cache.
        cache_bytes: Bytes of the cache; None is what the weights leave.
        pages: Pages of each table, instead of bytes.
        context: Maximum tokens of a sequence; None is the model's.
        prefix: Keep a prefix cache.
        ttl: Seconds that a cached prefix lives after its last use; None is forever.
        receives_kv: Sequences arrive from other instances with their pages.
        times: Step times; None is the roofline.
        policy: Scheduling policy; None is first come, first served.

    Raises:
        WorkbenchError: Where the weights leave no memory for a cache.
    """
    spec, context = sizes.spec, context or sizes.spec.max_position_embeddings
    room = memory_share * gpus * hardware.memory - sizes.weight_bytes if cache_bytes is None else cache_bytes
    page_bytes = tuple(round(each * page_size) for each in sizes.token_bytes)
    wanted = [table.max_pages(context, limits.max_prefill_tokens, page_size) for table in sizes.tables]
    whole = sum(pages * each for pages, each in zip(wanted, page_bytes, strict=True))
    counts = tuple(int(each * room // whole) if pages is None else pages for each in wanted)
    if min(counts) < 1:
        raise WorkbenchError(
            f"{spec.name} leaves no room for its cache: {sizes.weight_bytes / 1e9:.1f} GB of weights on {gpus} x "
            f"{hardware.name} with {hardware.memory / 1e9:.0f} GB each; give more gpus, or a smaller model"
        )
    return InstanceSpec(
        times or roofline_step_times(sizes, hardware, gpus), sizes.tables, counts, page_bytes, page_size, context, limits,
        policy, prefix, ttl, receives_kv, TICKS_PER_SECOND / (hardware.host * gpus),
    )  # fmt: skip
