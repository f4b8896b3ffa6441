"""The formula of a cache's bytes as a sum of products of named numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from compiled_kernels.quantized_attention import bits_per_number
from workbench.cache.shapes import KVCacheSpec
from workbench.engine.load import DTYPES
from workbench.model.memory import max_layer_columns
from workbench.study.memory_report import ModelMemory


@dataclass(frozen=True)
class Term:
    """Bytes of some layers of one sequence in one table: the product of `factors`, the last of which is tokens."""

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
    """Return the terms of one sequence. Their sum, rounded up, is `estimate.memory.sequence_bytes`."""
    dtype, found = DTYPES[estimate.dtype], []
    for shape, layers in Counter(estimate.shapes).items():
        packed = ((shape.group, "packed"), (shape.residual_group, "recent"))
        for number, told in packed if shape.format.quantized else ((shape.group, ""),):
            table = estimate.tables[number].table
            first, others = table.pages_needed(estimate.memory.context - 1, estimate.memory.context, estimate.page_size)
            tokens = (len(first) + len(others)) * estimate.page_size
            factors = (*_numbers(shape, layers, told == "packed", dtype), (tokens, _kind(shape, told, tokens, estimate)))
            found.append(Term(_what(shape, layers, told, len(estimate.shapes)), factors))
    return tuple(found)


def describe_estimate(estimate: ModelMemory, step_tokens: int) -> dict[str, str]:
    """Describe the computation of weight and activation bytes. The widest step has `step_tokens` tokens, or one of each
    sequence."""
    spec, found, itemsize = estimate.spec, estimate.memory, DTYPES[estimate.dtype].itemsize
    dense = found.weight_bytes == found.parameters * itemsize
    each = f" × {itemsize} bytes" if dense else f" × {found.weight_bytes / found.parameters:.4g} bytes, scales included"
    rows = f"{max(step_tokens, found.batch):,} tokens × (2 × {spec.hidden_size:,} width + {max_layer_columns(spec):,} widest)"
    logits = f"{found.batch:,} × {spec.vocab_size:,} vocab × 4 bytes"
    return {
        "weights": f"{found.parameters:,} parameters{each}",
        "activations": f"{rows} × {itemsize} bytes + {logits}",
    }


def _numbers(shape: KVCacheSpec, layers: int, packed: bool, dtype: torch.dtype) -> Sequence[tuple[float, str]]:
    each = (layers, "layers"), (shape.num_kv_heads, "groups"), (shape.head_dim, "dim")
    if packed:
        keys, values = shape.format.key_value_formats
        bits = bits_per_number(keys, shape.format.group, dtype)
        bits += bits_per_number(values, min(shape.format.columns, shape.head_dim), dtype)
        return *each, (bits / 8, "bytes a key and a value, scales included")
    if shape.num_value_columns is not None:
        return (layers, "layers"), (shape.head_dim, f"dim ({shape.num_value_columns} latent + {shape.head_dim - shape.num_value_columns} rotary)"), (
            dtype.itemsize, "bytes",
        )  # fmt: skip
    return (2, ""), *each, (dtype.itemsize, "bytes")


def _what(shape: KVCacheSpec, layers: int, told: str, all_layers: int) -> str:
    which = "every layer" if layers == all_layers else f"{layers} of {all_layers} layers"
    seen = "" if shape.sliding_window is None else f", window {shape.sliding_window:,}"
    seen += f" + {shape.num_sink_tokens:,} first" if shape.num_sink_tokens else ""
    stored = {"packed": f", settled as {shape.format}", "recent": ", not settled yet", "": ""}[told]
    return which + seen + stored


def _kind(shape: KVCacheSpec, told: str, tokens: int, counted: ModelMemory) -> str:
    if told:
        return "settled tokens" if told == "packed" else "recent tokens"
    return "tokens in sight" if shape.sliding_window is not None and tokens < counted.memory.context else "tokens"
