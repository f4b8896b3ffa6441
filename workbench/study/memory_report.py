"""Memory report of a model, for any config.json, folder or named shape: `workbench memory`."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from workbench.cache.shapes import CacheShape
from workbench.engine.load import DTYPES, SHAPE, SHIPPED
from workbench.errors import WorkbenchError, nearest
from workbench.model.any_config import spec_from_any_config
from workbench.model.memory import Memory, TableBytes, longest_context
from workbench.model.memory import memory as count
from workbench.model.quantized import WeightFormat
from workbench.model.shapes import named_shape
from workbench.model.spec import ModelSpec
from workbench.model.variants import vary_spec
from workbench.study.byte_sizes import parse_bytes, told_bytes
from workbench.study.cache_of import parts_of, store_of
from workbench.study.experiment import Experiment


def spec_and_remarks(name: str) -> tuple[ModelSpec, list[str]]:
    """Return the architecture of a named shape, a shipped model, a folder or a config.json, and remarks on what it
    leaves out."""
    if name.startswith(SHAPE):
        return named_shape(name.removeprefix(SHAPE)), []
    place = SHIPPED.get(name, Path(name))
    file = place / "config.json" if place.is_dir() else place
    if not file.is_file():
        raise WorkbenchError(f"{name}: no config.json there; name one, a folder with one, demo, or {SHAPE}NAME")
    return spec_from_any_config(file)


def grouped_saving(spec: ModelSpec) -> float | None:
    """Return how many times larger the cache would be with one key/value head for each query head.

    Returns None where heads have no keys of their own to cache (MLA)."""
    kinds = [layer.attention for layer in spec.layers]
    if any(kind.kind != "grouped" for kind in kinds):
        return None
    return sum(kind.heads * kind.dim for kind in kinds) / sum(kind.groups * kind.dim for kind in kinds)


@dataclass(frozen=True)
class Counted:
    """Memory of a model: `shapes` are the cache shapes of its layers, `tables` the bytes a token of each page table."""

    spec: ModelSpec
    shapes: tuple[CacheShape, ...]
    parts: tuple[TableBytes, ...]
    memory: Memory
    dtype: str
    page_size: int


def report(
    counted: Counted, settings: Mapping[str, Any], remarks: list[str], memory_bytes: int | None = None
) -> dict[str, Any]:
    """Return the report that `workbench memory --json` prints."""
    spec, found, told = counted.spec, counted.memory, list(remarks)
    if found.context > spec.context:
        told.insert(
            0, f"a formula: the model was made for {spec.context:,} positions, this context has {found.context:,}"
        )
    per_token = found.cache_bytes_per_token
    out = {
        "model": spec.name,
        **settings,
        "context": found.context,
        "model_context": spec.context,
        "beyond_model_context": found.context > spec.context,
        "batch": found.batch,
        "parameters": found.parameters,
        "weight_bytes": found.weight_bytes,
        "cache_bytes_per_token": int(per_token) if per_token == int(per_token) else per_token,
        "cache_bytes_per_sequence": found.sequence_bytes,
        "cache_bytes": found.cache_bytes,
        "activation_bytes": found.activation_bytes,
        "total_bytes": found.total_bytes,
        "grouped_saving": grouped_saving(spec),
        "remarks": told,
    }
    if memory_bytes is not None:
        out |= {"memory_bytes": memory_bytes, "sequences": found.sequences(memory_bytes)}
        out["longest_context"] = longest_context(found, counted.parts, memory_bytes, counted.page_size)
        if found.weight_bytes + found.activation_bytes > memory_bytes:
            told.append(f"weights and activations alone exceed {told_bytes(memory_bytes)}")
    return out


def of_spec(
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
) -> Counted:
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
    format = WeightFormat.of(weights) if isinstance(weights, str) else weights
    spec, shapes, parts = _kept(cast(Hashable, spec), dtype, cache, changes)
    format.check(spec)
    itemsize = DTYPES[dtype].itemsize
    found = count(spec, parts, context or spec.context, batch, itemsize, format, step_tokens, page_size)
    return Counted(spec, shapes, parts, found, dtype, page_size)


def of_name(
    name: str,
    *,
    dtype: str = "bfloat16",
    weights: str = "dense",
    cache: str = "dense",
    memory: str | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Return the memory report of the model called `name`; `settings` are those of `estimate_memory`."""
    spec, remarks = spec_and_remarks(name)
    found = of_spec(spec, dtype=dtype, weights=weights, cache=cache, **settings)
    told = {"dtype": dtype, "weights": weights, "cache": cache}
    return report(found, told, remarks, None if memory is None else parse_bytes(memory))


@functools.lru_cache(maxsize=64)  # a slider requests the same repeatedly; a ModelSpec is frozen
def _kept(
    spec: Any, dtype: str, cache: str, changes: tuple[str, ...]
) -> tuple[ModelSpec, tuple[CacheShape, ...], tuple[TableBytes, ...]]:
    settings = Experiment.of(
        {"question": "how much memory?", "cache": {"format": cache}, "workload": {"kind": "random"}}, "memory"
    ).with_(*changes)
    spec = vary_spec(spec, settings.attention)
    settings.cache.check(len(spec.layers), settings.cache.page_size)
    store = store_of(spec, settings.cache, dtype)
    return spec, store.shapes, parts_of(store)
