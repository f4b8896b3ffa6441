"""What an instance is made of, as a value: a cache of so many pages, limits, and step times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from workbench.cache.holdings import Holdings
from workbench.cache.pages import PagePool
from workbench.cache.prefix import PrefixIndex
from workbench.cache.tables import Table
from workbench.engine.policy import Policy
from workbench.engine.scheduler import Limits, Scheduler
from workbench.errors import WorkbenchError
from workbench.fleet.hardware import Hardware
from workbench.fleet.roofline import Sizes, roofline
from workbench.fleet.work import SECOND, StepTimes

PLACES = 16  # times as many pages come over from other instances as there are


@dataclass(frozen=True)
class Machine:
    """`pages` and `page_bytes` are those of each table; `arrives` says whether sequences come over from others, with
    their pages; `host` is what pages that move to and from the host's memory take, in ticks a byte."""

    times: StepTimes
    tables: tuple[Table, ...]
    pages: tuple[int, ...]
    page_bytes: tuple[int, ...]
    page_size: int
    context: int
    limits: Limits = Limits()
    policy: Policy | None = None  # first come first served unless given
    prefix: bool = False
    ttl: float | None = None  # seconds that a cached prefix lives after its last use
    arrives: bool = False
    host: float = 0.0

    def scheduler(self, clock: Callable[[], float]) -> Scheduler:
        """A scheduler of its own, with an empty cache."""
        pools = tuple(PagePool(pages, self.page_size) for pages in self.pages)
        rooms = tuple(PagePool(PLACES * pages, self.page_size) for pages in self.pages) if self.arrives else ()
        index = PrefixIndex(pools, self.tables, self.ttl, clock, rooms) if self.prefix else None
        holdings = Holdings(pools, self.tables, self.limits.chunk, index, rooms)
        return Scheduler(holdings, self.limits, self.context, self.policy)

    @property
    def kv_bytes_per_token(self) -> float:
        return sum(self.page_bytes) / self.page_size


def machine_of(
    sizes: Sizes,
    hardware: Hardware,
    limits: Limits,
    *,
    gpus: int = 1,
    page_size: int = 64,
    memory_share: float = 0.9,
    cache_bytes: float | None = None,
    pages: int | None = None,
    context: int | None = None,
    prefix: bool = False,
    ttl: float | None = None,
    arrives: bool = False,
    times: StepTimes | None = None,
    policy: Policy | None = None,
) -> Machine:
    """`gpus` of `hardware` that serve a model. What weights leave of `memory_share` of their memory is cache, unless
    `cache_bytes` says how much, or `pages` how many pages each table has. Tables share it in the proportion in which
    full contexts need them."""
    spec, context = sizes.spec, context or sizes.spec.context
    room = memory_share * gpus * hardware.memory - sizes.weight_bytes if cache_bytes is None else cache_bytes
    page_bytes = tuple(round(each * page_size) for each in sizes.token_bytes)
    wanted = [table.most(context, limits.chunk, page_size) for table in sizes.tables]
    whole = sum(pages * each for pages, each in zip(wanted, page_bytes, strict=True))
    counts = tuple(int(each * room // whole) if pages is None else pages for each in wanted)
    if min(counts) < 1:
        raise WorkbenchError(
            f"{spec.name} leaves no room for its cache: {sizes.weight_bytes / 1e9:.1f} GB of weights on {gpus} x "
            f"{hardware.name} with {hardware.memory / 1e9:.0f} GB each; give more gpus, or a smaller model"
        )
    return Machine(
        times or roofline(sizes, hardware, gpus), sizes.tables, counts, page_bytes, page_size, context, limits,
        policy, prefix, ttl, arrives, SECOND / (hardware.host * gpus),
    )  # fmt: skip
