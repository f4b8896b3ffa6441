"""Find the capacity of a fixed amount of memory: split it into page pools, and let the scheduler fill these with
sequences.

The KV cache of a spec and an experiment's settings is built on torch's meta device, so that its bytes are counted
without allocating memory.
"""

from __future__ import annotations

import functools
from collections import abc

from workbench.engine.config import DTYPES, CacheConfig
from workbench.engine.loaded_model import describe_model
from workbench.errors import WorkbenchError
from workbench.experiment.experiment import Experiment
from workbench.kv_cache.budget import EvictionBudget
from workbench.kv_cache.manager import KVCacheManager
from workbench.kv_cache.pages import KVCacheGroup, PagePool
from workbench.kv_cache.store import KVStore
from workbench.model import memory
from workbench.model.memory import UNLIMITED_TOKENS, KVGroupBytes, cache_shapes
from workbench.model.spec import ModelSpec
from workbench.request import Request, SamplingParameters, Sequence
from workbench.scheduler.limits import SchedulerLimits
from workbench.scheduler.plan import RequestRefused
from workbench.scheduler.scheduler import Scheduler


def page_bytes(store: KVStore) -> tuple[int, ...]:
    """Return for each page table of the cache the bytes of one of its pages, counted from the tensors."""
    return tuple(
        sum(tensor.nbytes // tensor.shape[0] for tensor in store.page_tensors(table))
        for table in range(len(store.groups))
    )


def lasting_bytes_per_token(store: KVStore) -> float:
    """Return the cache bytes that a token takes for good. In layers that keep recent tokens unquantized for a while,
    only its quantized bytes count."""
    late = {layer for table in store.groups if table.is_delayed for layer in table.layers}
    kept = [table.is_delayed or not late.intersection(table.layers) for table in store.groups]
    sizes = zip(store.groups, page_bytes(store), kept, strict=True)
    return sum(size for table, size, counts in sizes if counts and not table.is_recurrent) / store.page_size


def split_budget_into_pages(
    tables: abc.Sequence[KVCacheGroup],
    sizes: abc.Sequence[int],
    budget: int,
    tokens: int,
    max_num_batched_tokens: int,
    page_size: int,
    evict: EvictionBudget | None = None,
) -> tuple[tuple[int, ...], int]:
    """Divide a budget of bytes among the page tables, so that as many sequences as possible can decode while another is
    prefilled.

    Args:
        tables: The page tables of the cache.
        sizes: Bytes of a page of each table.
        budget: Bytes available, null pages included.
        tokens: Tokens of each sequence.
        max_num_batched_tokens: Tokens of a step.
        page_size: Tokens of a page.
        evict: Maximum cached tokens of a sequence, if tokens are evicted.

    Returns:
        Pages of each table, and the number of sequences that they hold.
    """
    prompt = _prompt(tokens, page_size)
    rest = tokens if evict is None else evict.tokens_after_prompt(prompt, tokens)
    top = tokens if evict is None else evict.peak_tokens(prompt, tokens)
    steady = [table.max_pages(rest, 1, page_size) for table in tables]
    ahead = [
        table.max_pages(top, max_num_batched_tokens, page_size) - count
        for table, count in zip(tables, steady, strict=True)
    ]
    one = sum(count * size for count, size in zip(steady, sizes, strict=True))
    once = sum((1 + count) * size for count, size in zip(ahead, sizes, strict=True))
    fit = (budget - once) // one
    if fit < 1:
        raise WorkbenchError(
            f"a pool of {budget:,} bytes holds no sequence of {tokens:,} tokens: one takes {one + once:,}"
        )
    return tuple(max(1, fit * count + more) for count, more in zip(steady, ahead, strict=True)), fit


def max_concurrent_sequences(
    tables: abc.Sequence[KVCacheGroup],
    pages: abc.Sequence[int],
    page_size: int,
    tokens: int,
    max_num_batched_tokens: int,
    lower_bound: int,
    evict: EvictionBudget | None = None,
) -> int:
    """Return the maximum number of sequences of `tokens` tokens that the scheduler runs at once without preempting or
    delaying any.

    The search begins at `lower_bound` and ends at twice that."""
    runs = functools.partial(_runs_without_preemption, tables, pages, page_size, tokens, max_num_batched_tokens, evict)
    low, high = 0, lower_bound
    while high <= 2 * lower_bound and runs(high):
        low, high = high, max(high + 1, high + high // 4)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if runs(middle) else (low, middle)
    return low


def _runs_without_preemption(
    tables: abc.Sequence[KVCacheGroup],
    pages: abc.Sequence[int],
    page: int,
    tokens: int,
    chunk: int,
    evict: EvictionBudget | None,
    count: int,
) -> bool:
    """Return whether `count` sequences are prefilled and decode their last two pages without a preemption."""
    pools = tuple(PagePool(number, page) for number in pages)
    scheduler = Scheduler(
        KVCacheManager(pools, tables, chunk, budget=evict),
        SchedulerLimits(max_num_seqs=count, max_num_batched_tokens=chunk),
        tokens + 1,
    )
    prompt = _prompt(tokens, page)
    sampling = SamplingParameters(max_tokens=tokens + 1 - prompt)
    try:
        for index in range(count):
            scheduler.submit(Sequence.from_request(Request(str(index), (0,) * prompt, sampling), index))
    except RequestRefused:  # not even one sequence fits
        return False
    while (plan := scheduler.plan()) is not None:
        if any(decision.action == "preempted" for decision in plan.decisions):
            return False
        scheduler.commit(plan, {s.sequence.request_id: 0 for s in plan.spans if s.needs_sample and s.end < tokens})
    return sum(sequence.num_computed_tokens == tokens for sequence in scheduler.running) == count


def _prompt(tokens: int, page: int) -> int:
    """Return the prompt length that leaves the last two pages of a sequence to be decoded."""
    return max(1, tokens - 2 * page)


def spec_and_dtype(experiment: Experiment) -> tuple[ModelSpec, str]:
    """Return the architecture of an experiment's model and its dtype's name, without loading weights."""
    spec, stored = describe_model(experiment.model.name, experiment.attention, experiment.model.context)
    dtype = stored if experiment.model.dtype == "auto" else experiment.model.dtype
    return spec, dtype


def meta_kv_store(spec: ModelSpec, cache: CacheConfig, dtype: str, pages: int = 1) -> KVStore:
    """Build the cache of `spec` in the format of `cache` on torch's meta device (no memory is allocated), with `pages`
    pages in each table."""
    shapes = cache_shapes(spec, cache)
    tables = max(table for shape in shapes for table in shape.cache_groups) + 1
    kept = dtype if cache.dtype == "auto" else cache.dtype
    return KVStore(shapes, (pages,) * tables, cache.page_size, DTYPES[kept], "meta")


def break_even_context(experiment: Experiment, baseline: Experiment) -> int | None:
    """Return the context length in tokens from which on a sequence's cache is smaller under `experiment` than under
    `baseline`.

    Sizes are peaks in whole pages, computed from the formats without running. Returns None if the cache is never
    smaller.

    Example: `workbench.break_even_context(experiment.with_("cache.format=int4"), experiment)`
    """
    spec, dtype = spec_and_dtype(experiment)
    stores = [meta_kv_store(spec, each.cache, dtype) for each in (experiment, baseline)]
    schedule = experiment.schedule
    chunk = min(schedule.chunk_tokens or schedule.max_num_batched_tokens, schedule.max_num_batched_tokens)
    found = memory.break_even_context(
        bytes_by_table(stores[0]), bytes_by_table(stores[1]), chunk, experiment.cache.page_size
    )
    return None if found == UNLIMITED_TOKENS else found


def bytes_by_table(store: KVStore) -> tuple[KVGroupBytes, ...]:
    """Return for each page table the bytes stored per token, or per state for a table of recurrent states."""
    return tuple(
        KVGroupBytes(table, 0.0, size) if table.is_recurrent else KVGroupBytes(table, size / store.page_size)
        for table, size in zip(store.groups, page_bytes(store), strict=True)
    )
