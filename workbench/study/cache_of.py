"""The KV cache that a spec and an experiment's settings describe, on torch's meta device, so that bytes can be counted
without memory."""

from __future__ import annotations

from workbench.cache.store import KVStore
from workbench.engine.load import DTYPES, describe_model
from workbench.model.cache_shapes import cache_shapes
from workbench.model.memory import UNLIMITED_TOKENS, KVGroupBytes, break_even_context
from workbench.model.spec import ModelSpec
from workbench.study.capacity import page_bytes
from workbench.study.experiment import CacheSettings, Experiment


def spec_and_dtype(experiment: Experiment) -> tuple[ModelSpec, str]:
    """Return the architecture of an experiment's model and its dtype's name, without loading weights."""
    spec, stored = describe_model(experiment.model.name, experiment.attention)
    dtype = stored if experiment.model.dtype == "auto" else experiment.model.dtype
    return spec, dtype


def meta_kv_store(spec: ModelSpec, cache: CacheSettings, dtype: str, pages: int = 1) -> KVStore:
    """Build the cache of `spec` in `cache`'s format on torch's meta device, with `pages` pages in each table."""
    shapes = cache_shapes(spec, cache)
    tables = max(table for shape in shapes for table in shape.cache_groups) + 1
    kept = dtype if cache.dtype == "auto" else cache.dtype
    return KVStore(shapes, (pages,) * tables, cache.page_size, DTYPES[kept], "meta")


def break_even_context(experiment: Experiment, baseline: Experiment) -> int | None:
    """Return the context, in tokens, from which on a sequence's cache is smaller under `experiment` than under
    `baseline`.

    Sizes are peaks in whole pages, counted from the formats alone: nothing runs. Returns None where the cache is never
    smaller."""
    spec, dtype = spec_and_dtype(experiment)
    stores = [meta_kv_store(spec, each.cache, dtype) for each in (experiment, baseline)]
    schedule = experiment.schedule
    chunk = min(schedule.chunk_tokens or schedule.max_num_batched_tokens, schedule.max_num_batched_tokens)
    found = break_even_context(bytes_by_table(stores[0]), bytes_by_table(stores[1]), chunk, experiment.cache.page_size)
    return None if found == UNLIMITED_TOKENS else found


def bytes_by_table(store: KVStore) -> tuple[KVGroupBytes, ...]:
    """Return the bytes that each table stores for a token."""
    sizes = zip(store.groups, page_bytes(store), strict=True)
    return tuple(KVGroupBytes(table, size / store.page_size) for table, size in sizes)
