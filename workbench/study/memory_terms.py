"""The formula of a cache's bytes as a sum of products of named numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from compiled_kernels.quantized_attention import bits_per_number
from workbench.cache.shapes import CacheShape
from workbench.engine.load import DTYPES
from workbench.model.memory import widest_columns
from workbench.study.memory_report import Counted


@dataclass(frozen=True)
class Term:
    """Bytes of some layers of one sequence in one table: the product of `factors`, the last of which is tokens."""

    what: str
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


def terms(counted: Counted) -> tuple[Term, ...]:
    """Return the terms of one sequence. Their sum, rounded up, is `estimate.memory.sequence_bytes`."""
    dtype, found = DTYPES[counted.dtype], []
    for shape, layers in Counter(counted.shapes).items():
        packed = ((shape.table, "packed"), (shape.recent, "recent"))
        for number, told in packed if shape.format.packed else ((shape.table, ""),):
            table = counted.parts[number].table
            first, others = table.held(counted.memory.context - 1, counted.memory.context, counted.page_size)
            tokens = (len(first) + len(others)) * counted.page_size
            factors = (*_numbers(shape, layers, told == "packed", dtype), (tokens, _kind(shape, told, tokens, counted)))
            found.append(Term(_what(shape, layers, told, len(counted.shapes)), factors))
    return tuple(found)


def in_words(counted: Counted, step_tokens: int) -> dict[str, str]:
    """Describe the computation of weight and activation bytes. The widest step has `step_tokens` tokens, or one of each
    sequence."""
    spec, found, itemsize = counted.spec, counted.memory, DTYPES[counted.dtype].itemsize
    dense = found.weight_bytes == found.parameters * itemsize
    each = f" × {itemsize} bytes" if dense else f" × {found.weight_bytes / found.parameters:.4g} bytes, scales included"
    rows = f"{max(step_tokens, found.batch):,} tokens × (2 × {spec.width:,} width + {widest_columns(spec):,} widest)"
    logits = f"{found.batch:,} × {spec.vocab:,} vocab × 4 bytes"
    return {
        "weights": f"{found.parameters:,} parameters{each}",
        "activations": f"{rows} × {itemsize} bytes + {logits}",
    }


def _numbers(shape: CacheShape, layers: int, packed: bool, dtype: torch.dtype) -> Sequence[tuple[float, str]]:
    each = (layers, "layers"), (shape.groups, "groups"), (shape.dim, "dim")
    if packed:
        keys, values = shape.format.kinds
        bits = bits_per_number(keys, shape.format.group, dtype)
        bits += bits_per_number(values, min(shape.format.columns, shape.dim), dtype)
        return *each, (bits / 8, "bytes a key and a value, scales included")
    if shape.shared is not None:
        return (layers, "layers"), (shape.dim, f"dim ({shape.shared} latent + {shape.dim - shape.shared} rotary)"), (
            dtype.itemsize, "bytes",
        )  # fmt: skip
    return (2, ""), *each, (dtype.itemsize, "bytes")


def _what(shape: CacheShape, layers: int, told: str, all_layers: int) -> str:
    which = "every layer" if layers == all_layers else f"{layers} of {all_layers} layers"
    seen = "" if shape.window is None else f", window {shape.window:,}"
    seen += f" + {shape.sinks:,} first" if shape.sinks else ""
    stored = {"packed": f", settled as {shape.format}", "recent": ", not settled yet", "": ""}[told]
    return which + seen + stored


def _kind(shape: CacheShape, told: str, tokens: int, counted: Counted) -> str:
    if told:
        return "settled tokens" if told == "packed" else "recent tokens"
    return "tokens in sight" if shape.window is not None and tokens < counted.memory.context else "tokens"
