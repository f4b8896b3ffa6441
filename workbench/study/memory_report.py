"""Memory report of a model, for any config.json, folder or named shape: `workbench memory`."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from workbench.cache.shapes import KVCacheSpec
from workbench.engine.load import DTYPES, SHAPE_PREFIX, BUNDLED_MODELS
from workbench.errors import WorkbenchError, nearest
from workbench.model.any_config import spec_from_any_config
from workbench.model.memory import MemoryEstimate, KVGroupBytes, longest_context
from workbench.model.memory import estimate_memory as estimate_memory
from workbench.model.quantized import WeightFormat
from workbench.model.shapes import named_shape
from workbench.model.spec import ModelSpec
from workbench.model.variants import change_spec
from workbench.study.byte_sizes import parse_bytes, format_bytes
from workbench.study.cache_of import bytes_by_table, meta_kv_store
from workbench.study.experiment import Experiment


def read_spec_and_remarks(name: str) -> tuple[ModelSpec, list[str]]:
    """Return the architecture of a named shape, a shipped model, a folder or a config.json, and remarks on what it
    leaves out."""
    if name.startswith(SHAPE_PREFIX):
        return named_shape(name.removeprefix(SHAPE_PREFIX)), []
    place = BUNDLED_MODELS.get(name, Path(name))
    file = place / "config.json" if place.is_dir() else place
    if not file.is_file():
        raise WorkbenchError(f"{name}: no config.json there; name one, a folder with one, demo, or {SHAPE_PREFIX}NAME")
    return spec_from_any_config(file)


def gqa_saving(spec: ModelSpec) -> float | None:
    """Return how many times larger the cache would be with one key/value head for each query head.

    Returns None where heads have no keys of their own to cache (MLA)."""
    kinds = [layer.attention for layer in spec.layers]
    if any(kind.kind != "grouped" for kind in kinds):
        return None
    return sum(kind.num_heads * kind.head_dim for kind in kinds) / sum(kind.num_kv_heads * kind.head_dim for kind in kinds)


@dataclass(frozen=True)
class ModelMemory:
    """Memory of a model: `shapes` are the cache shapes of its layers, `tables` the bytes a token of each page table."""

    spec: ModelSpec
    shapes: tuple[KVCacheSpec, ...]
    tables: tuple[KVGroupBytes, ...]
    memory: MemoryEstimate
    dtype: str
    page_size: int


def memory_report(
    estimate: ModelMemory, settings: Mapping[str, Any], remarks: list[str], memory_bytes: int | None = None
) -> dict[str, Any]:
    """Return the report that `workbench memory --json` prints."""
    spec, found, told = estimate.spec, estimate.memory, list(remarks)
    if found.context > spec.max_position_embeddings:
        told.insert(
            0, f"a formula: the model was made for {spec.max_position_embeddings:,} positions, this context has {found.context:,}"
        )
    per_token = found.cache_bytes_per_token
    out = {
        "model": spec.name,
        **settings,
        "context": found.context,
        "model_context": spec.max_position_embeddings,
        "beyond_model_context": found.context > spec.max_position_embeddings,
        "batch": found.batch,
        "parameters": found.parameters,
        "weight_bytes": found.weight_bytes,
        "cache_bytes_per_token": int(per_token) if per_token == int(per_token) else per_token,
        "cache_bytes_per_sequence": found.sequence_bytes,
        "cache_bytes": found.cache_bytes,
        "activation_bytes": found.activation_bytes,
        "total_bytes": found.total_bytes,
        "grouped_saving": gqa_saving(spec),
        "remarks": told,
    }
    if memory_bytes is not None:
        out |= {"memory_bytes": memory_bytes, "sequences": found.max_sequences(memory_bytes)}
        out["longest_context"] = longest_context(found, estimate.tables, memory_bytes, estimate.page_size)
        if found.weight_bytes + found.activation_bytes > memory_bytes:
            told.append(f"weights and activations alone exceed {format_bytes(memory_bytes)}")
    return out


def estimate_memory(
    spec: ModelSpec,
    *,
    context: int | None = None,
    batch: int = 1,
    dtype: str = "bfloat16",
    weights: str | WeightFormat = "dense",
    cache: str = "dense",
    changes: tuple[str, ...] = (),
    step_tokens: int = 512,
    page_size: int = 1,
) -> ModelMemory:
    """Estimate the memory of a model.

    Args:
        spec: The architecture.
        context: Tokens of each sequence; None is the model's maximum.
        batch: Number of sequences.
        dtype: Name of the dtype of weights and dense cache.
        weights: Weight format.
        cache: Cache format.
        changes: Settings of cache and attention, `path=value` as in an experiment.
        step_tokens: Tokens of the widest step.
        page_size: Tokens of a page.

    Raises:
        WorkbenchError: For settings that such a model cannot have.
    """
    if dtype not in DTYPES:
        raise WorkbenchError(f"unknown dtype {dtype!r}{nearest(dtype, DTYPES)}; known: {', '.join(DTYPES)}")
    format = WeightFormat.parse(weights) if isinstance(weights, str) else weights
    spec, shapes, parts = _cache_layout(cast(Hashable, spec), dtype, cache, changes)
    format.check(spec)
    itemsize = DTYPES[dtype].itemsize
    found = estimate_memory(spec, parts, context or spec.max_position_embeddings, batch, itemsize, format, step_tokens, page_size)
    return ModelMemory(spec, shapes, parts, found, dtype, page_size)


def report_for(
    name: str,
    *,
    dtype: str = "bfloat16",
    weights: str = "dense",
    cache: str = "dense",
    memory: str | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Return the memory report of the model called `name`; `settings` are those of `estimate_memory`."""
    spec, remarks = read_spec_and_remarks(name)
    found = estimate_memory(spec, dtype=dtype, weights=weights, cache=cache, **settings)
    told = {"dtype": dtype, "weights": weights, "cache": cache}
    return memory_report(found, told, remarks, None if memory is None else parse_bytes(memory))


@functools.lru_cache(maxsize=64)  # a slider requests the same repeatedly; a ModelSpec is frozen
def _cache_layout(
    spec: Any, dtype: str, cache: str, changes: tuple[str, ...]
) -> tuple[ModelSpec, tuple[KVCacheSpec, ...], tuple[KVGroupBytes, ...]]:
    settings = Experiment.from_values(
        {"question": "how much memory?", "cache": {"format": cache}, "workload": {"kind": "random"}}, "memory"
    ).with_(*changes)
    spec = change_spec(spec, settings.attention)
    settings.cache.check(len(spec.layers), settings.cache.page_size)
    store = meta_kv_store(spec, settings.cache, dtype)
    return spec, store.specs, bytes_by_table(store)
