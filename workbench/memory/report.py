"""Report the memory of a model, for any config.json, folder or named shape: `workbench model memory`.

The report writes the bytes of a cache as a sum of products of named numbers.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from compiled_kernels.quantized_attention import bits_per_number
from workbench.engine.config import DTYPES
from workbench.engine.loaded_model import SHAPE_PREFIX, model_folder
from workbench.errors import WorkbenchError, nearest
from workbench.experiment.experiment import Experiment
from workbench.kv_cache.format import KVCacheSpec
from workbench.memory.capacity import bytes_by_table, meta_kv_store
from workbench.memory.ranks import rank_memories, ranks_report
from workbench.model import memory
from workbench.model.formats.open import gguf_file
from workbench.model.hf.any_config import spec_from_any_config
from workbench.model.hf.families import read_spec
from workbench.model.memory import KVGroupBytes, MemoryEstimate, longest_context, max_layer_columns
from workbench.model.quantized import WeightFormat
from workbench.model.shapes import named_shape
from workbench.model.spec import ModelSpec
from workbench.model.variants import change_spec
from workbench.units import format_bytes, parse_bytes


def describe_longest(found: dict[str, Any]) -> str:
    """Return the number and maximum length of the sequences that fit, from a memory report, as text: `4 of up to 900
    tokens each`."""
    longest, batch = found["longest_context"], f"{found['batch']:,}"
    if longest is None:
        return f"{batch} of any length"
    if longest == 0:
        return f"not even {batch} of a single token"
    return f"{batch} of up to {longest:,} token{'s' * (longest != 1)} each"


def read_spec_and_remarks(name: str) -> tuple[ModelSpec, list[str]]:
    """Return the architecture of a model name or config.json, and remarks on parts that it leaves out."""
    if name.startswith(SHAPE_PREFIX):
        return named_shape(name.removeprefix(SHAPE_PREFIX)), []
    place = Path(name) if Path(name).is_file() else model_folder(name)
    assert place is not None  # a named shape is handled above
    if gguf_file(place) is not None:
        return read_spec(place), []
    file = place / "config.json" if place.is_dir() else place
    if not file.is_file():
        raise WorkbenchError(f"{name}: has no config.json")
    return spec_from_any_config(file)


def gqa_saving(spec: ModelSpec) -> float | None:
    """Return the factor by which the cache would be larger with one key/value head for each query head.

    Layers that share another layer's keys and values do not count. Returns None if heads have no cached keys of their
    own (MLA)."""
    kinds = [layer.attention for layer in spec.layers if layer.attention.kv_shared_with is None]
    if any(kind.kind != "grouped" for kind in kinds):
        return None
    return sum(kind.num_heads * kind.head_dim for kind in kinds) / sum(
        kind.num_kv_heads * kind.head_dim for kind in kinds
    )


@dataclass(frozen=True)
class ModelMemory:
    """The memory of a model; `shapes` are the cache shapes of its layers, and `tables` the bytes per token in each page
    table."""

    spec: ModelSpec
    shapes: tuple[KVCacheSpec, ...]
    tables: tuple[KVGroupBytes, ...]
    memory: MemoryEstimate
    dtype: str
    page_size: int


def memory_report(
    estimate: ModelMemory, settings: Mapping[str, Any], remarks: list[str], memory_bytes: int | None = None
) -> dict[str, Any]:
    """Return the report that `workbench model memory --json` prints."""
    spec, found, notes = estimate.spec, estimate.memory, list(remarks)
    if found.context > spec.max_position_embeddings:
        notes.insert(
            0,
            f"a formula: the model was made for {spec.max_position_embeddings:,} positions, "
            f"this context has {found.context:,}",
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
        "remarks": notes,
    }
    if memory_bytes is not None:
        out |= {"memory_bytes": memory_bytes, "sequences": found.max_sequences(memory_bytes)}
        out["longest_context"] = longest_context(found, estimate.tables, memory_bytes, estimate.page_size)
        if found.weight_bytes + found.activation_bytes > memory_bytes:
            notes.append(f"weights and activations alone exceed {format_bytes(memory_bytes)}")
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
        WorkbenchError: For settings that this model cannot have.
    """
    if dtype not in DTYPES:
        raise WorkbenchError(f"unknown dtype {dtype!r}{nearest(dtype, DTYPES)}; known: {', '.join(DTYPES)}")
    format = WeightFormat.parse(weights) if isinstance(weights, str) else weights
    spec, shapes, parts = _cache_layout(cast(Hashable, spec), dtype, cache, changes)
    format.check(spec)
    itemsize = DTYPES[dtype].itemsize
    found = memory.estimate_memory(
        spec, parts, context or spec.max_position_embeddings, batch, itemsize, format, step_tokens, page_size
    )
    return ModelMemory(spec, shapes, parts, found, dtype, page_size)


def report_for(
    name: str,
    *,
    dtype: str = "bfloat16",
    weights: str = "dense",
    cache: str = "dense",
    memory: str | None = None,
    tensor: int = 1,
    pipeline: int = 1,
    **settings: Any,
) -> dict[str, Any]:
    """Return the memory report of the model called `name`; `settings` are arguments of `estimate_memory`. With `tensor`
    ranks per layer or `pipeline` stages it has the memory of each rank, and `memory` is the size of each device."""
    spec, remarks = read_spec_and_remarks(name)
    found = estimate_memory(spec, dtype=dtype, weights=weights, cache=cache, **settings)
    room = None if memory is None else parse_bytes(memory)
    shown = {"dtype": dtype, "weights": weights, "cache": cache}
    if tensor == pipeline == 1:
        return memory_report(found, shown, remarks, room)
    of_cache = cache_settings(cache, settings.get("changes", ())).cache
    ranks = rank_memories(
        found.spec, dtype, WeightFormat.parse(weights), of_cache, tensor=tensor, pipeline=pipeline,
        context=found.memory.context, batch=found.memory.batch, step_tokens=settings.get("step_tokens", 512),
        page_size=found.page_size,
    )  # fmt: skip
    least = max(each.memory.weight_bytes + each.memory.activation_bytes for each in ranks)
    if room is not None and least > room:
        remarks = [*remarks, f"weights and activations of one rank alone exceed {format_bytes(room)}"]
    report = memory_report(found, {**shown, "tensor": tensor, "pipeline": pipeline}, remarks)
    return report | ({} if room is None else {"memory_bytes": room}) | ranks_report(ranks, room)


def cache_settings(cache: str, changes: tuple[str, ...]) -> Experiment:
    """Return an experiment with a cache of this format and these changes."""
    values = {"question": "how much memory?", "cache": {"format": cache}, "workload": {"kind": "random"}}
    return Experiment.from_values(values, "memory").with_(*changes)


@functools.lru_cache(maxsize=64)  # a slider repeats the same requests; a ModelSpec is frozen
def _cache_layout(
    spec: Any, dtype: str, cache: str, changes: tuple[str, ...]
) -> tuple[ModelSpec, tuple[KVCacheSpec, ...], tuple[KVGroupBytes, ...]]:
    settings = cache_settings(cache, changes)
    spec = change_spec(spec, settings.attention)
    settings.cache.check(len(spec.layers), settings.cache.page_size)
    store = meta_kv_store(spec, settings.cache, dtype)
    return spec, store.specs, bytes_by_table(store)


@dataclass(frozen=True)
class Term:
    """One term of a cache's formula: the bytes of some layers in one page table for one sequence. It is the product of
    `factors`, the last of which is the number of tokens."""

    name: str
    factors: tuple[tuple[float, str], ...]

    @property
    def bytes(self) -> float:
        return math.prod(value for value, _ in self.factors)

    @property
    def bytes_per_token(self) -> float:
        return math.prod(value for value, _ in self.factors[:-1])

    def __str__(self) -> str:
        """`2 x 6 layers x 2 groups x 64 dim x 2 bytes x 1,024 tokens`."""
        return " × ".join(f"{value:,.10g} {name}".strip() for value, name in self.factors)


def cache_terms(estimate: ModelMemory) -> tuple[Term, ...]:
    """Return the terms whose sum, rounded up, is the cache of one sequence: `estimate.memory.sequence_bytes`."""
    dtype, found = DTYPES[estimate.dtype], []
    for shape, layers in Counter(shape for shape in estimate.shapes if shape.num_kv_heads).items():
        parts = ((shape.group, "quantized"), (shape.residual_group, "recent"))
        for number, part in parts if shape.keeps_residual else ((shape.group, ""),):
            table = estimate.tables[number].table
            first, others = table.pages_needed(estimate.memory.context - 1, estimate.memory.context, estimate.page_size)
            tokens = (len(first) + len(others)) * estimate.page_size
            factors = (
                *_numbers(shape, layers, part == "quantized", dtype),
                (tokens, _kind(shape, part, tokens, estimate)),
            )
            found.append(Term(_what(shape, layers, part, len(estimate.shapes)), factors))
    for part in estimate.tables:
        if part.table.is_recurrent:
            pages = part.table.max_pages(estimate.memory.context, 1, estimate.page_size)
            factors = (part.state_bytes, "bytes of a state in each"), (pages, "states")
            found.append(Term(f"{len(part.table.layers)} recurrent layers", factors))
    return tuple(found)


def describe_estimate(estimate: ModelMemory, step_tokens: int) -> dict[str, str]:
    """Describe how the bytes of weights and activations are computed. The widest step has `step_tokens` tokens, or one
    token per sequence."""
    spec, found, itemsize = estimate.spec, estimate.memory, DTYPES[estimate.dtype].itemsize
    dense = found.weight_bytes == found.parameters * itemsize
    each = f" × {itemsize} bytes" if dense else f" × {found.weight_bytes / found.parameters:.4g} bytes, scales included"
    rows = (
        f"{max(step_tokens, found.batch):,} tokens × "
        f"(2 × {spec.residual_columns:,} width + {max_layer_columns(spec):,} widest)"
    )
    logits = f"{found.batch:,} × {spec.vocab_size:,} vocab × 4 bytes"
    return {
        "weights": f"{found.parameters:,} parameters{each}",
        "activations": f"{rows} × {itemsize} bytes + {logits}",
    }


def _numbers(shape: KVCacheSpec, layers: int, quantized: bool, dtype: torch.dtype) -> Sequence[tuple[float, str]]:
    each = (layers, "layers"), (shape.num_kv_heads, "groups"), (shape.head_dim, "dim")
    if quantized and shape.codec is None:
        keys, values = shape.format.key_value_formats
        bits = bits_per_number(keys, shape.format.quant_group, dtype)
        bits += bits_per_number(values, min(shape.format.columns, shape.head_dim), dtype)
        return *each, (bits / 8, "bytes a key and a value, scales included")
    if shape.codec is not None and (quantized or not shape.keeps_residual):
        return (layers, "layers"), (shape.bytes_per_token(dtype), f"bytes a token's keys and values, {shape.format}")
    if shape.num_value_columns is not None:
        return (
            (layers, "layers"),
            (
                shape.head_dim,
                f"dim ({shape.num_value_columns} latent + {shape.head_dim - shape.num_value_columns} rotary)",
            ),
            (dtype.itemsize, "bytes"),
        )
    return (2, ""), *each, (dtype.itemsize, "bytes")


def _what(shape: KVCacheSpec, layers: int, part: str, all_layers: int) -> str:
    which = "every layer" if layers == all_layers else f"{layers} of {all_layers} layers"
    seen = "" if shape.sliding_window is None else f", window {shape.sliding_window:,}"
    seen += f" + {shape.num_sink_tokens:,} first" if shape.num_sink_tokens else ""
    stored = {"quantized": f", settled as {shape.format}", "recent": ", not settled yet", "": ""}[part]
    return which + seen + stored


def _kind(shape: KVCacheSpec, part: str, tokens: int, counted: ModelMemory) -> str:
    if part:
        return "settled tokens" if part == "quantized" else "recent tokens"
    return "tokens in sight" if shape.sliding_window is not None and tokens < counted.memory.context else "tokens"
