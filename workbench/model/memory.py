"""Estimates of a model's memory, from shapes alone: weights, cache, activations."""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, cast

from workbench.cache.tables import Table
from workbench.model.latent_spec import LatentAttention
from workbench.model.parameters import parameter_shapes
from workbench.model.quantized import DENSE, WeightFormat
from workbench.model.spec import LayerKind, ModelSpec

INT8_SCALE, INT4_SCALE = 4, 2  # bytes of a scale
ENDLESS = 2**50  # tokens


@dataclass(frozen=True)
class TableBytes:
    """The cache of one group of layers: `bytes_per_token` of each position that it keeps."""

    table: Table
    bytes_per_token: float

    def bytes(self, tokens: int, page_size: int = 1) -> float:
        """Return the bytes of one sequence of `tokens` tokens, in whole pages of `page_size`, when its last token is
        computed."""
        first, others = self.table.held(tokens - 1, tokens, page_size)
        return (len(first) + len(others)) * page_size * self.bytes_per_token


@dataclass(frozen=True)
class Memory:
    """Bytes of a model that serves `batch` sequences of `context` tokens.

    `cache_bytes_per_token` is what a token takes while every layer keeps it; where windows or formats make layers keep
    less, the cache of a sequence is not that many times its tokens.
    """

    context: int
    batch: int
    parameters: int
    weight_bytes: int
    cache_bytes_per_token: float
    sequence_bytes: int  # cache of one sequence
    activation_bytes: int

    @property
    def cache_bytes(self) -> int:
        return self.batch * self.sequence_bytes

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes + self.activation_bytes

    def sequences(self, memory_bytes: int) -> int:
        """Return how many such sequences fit beside weights and activations into `memory_bytes`."""
        return max(0, (memory_bytes - self.weight_bytes - self.activation_bytes) // self.sequence_bytes)


def memory(
    spec: ModelSpec,
    parts: tuple[TableBytes, ...],
    context: int,
    batch: int = 1,
    itemsize: int = 2,
    format: WeightFormat = WeightFormat(),  # noqa: B008 (a frozen value)
    step_tokens: int = 512,
    page_size: int = 1,
) -> Memory:
    """Estimate the memory of a model.

    Args:
        spec: the model.
        parts: the cache's groups of layers.
        context: tokens of each sequence.
        batch: sequences.
        itemsize: bytes of a dense weight or activation.
        format: storage of the matrices.
        step_tokens: tokens that the largest step computes, or one of each sequence.
        page_size: tokens of a page.
    """
    late = {layer for part in parts if part.table.late for layer in part.table.layers}
    lasting = [part for part in parts if part.table.late or not late.intersection(part.table.layers)]
    return Memory(
        context=context,
        batch=batch,
        parameters=spec.parameters,
        weight_bytes=weight_bytes(spec, itemsize, format),
        cache_bytes_per_token=sum(part.bytes_per_token for part in lasting),
        sequence_bytes=math.ceil(sum(part.bytes(context, page_size) for part in parts)),
        activation_bytes=activation_bytes(spec, max(step_tokens, batch), itemsize, samples=batch),
    )


def smaller_from(parts: tuple[TableBytes, ...], others: tuple[TableBytes, ...], chunk: int, page_size: int = 1) -> int:
    """Return the context in tokens from which on one sequence takes fewer bytes in `parts` than in `others`, at its
    peak, where a step computes `chunk_tokens` of its tokens at most. `UNLIMITED_TOKENS` where it never does.

    A quantized cache keeps what a step computes in full precision until the step has read it: the larger the chunk,
    the later it pays.
    """

    def smaller(tokens: int) -> bool:
        return peak_bytes(parts, tokens, chunk, page_size) < peak_bytes(others, tokens, chunk, page_size)

    tables = [part.table for part in (*parts, *others)]
    period = math.lcm(page_size, *(each for table in tables for each in (table.group, table.stride)))
    # Beyond `high` a table takes, one period further on, its bytes of a period more, or no more where it has a window.
    high = max((table.back or 0) + table.lag + table.group for table in tables) + chunk + 2 * page_size
    growing, fixed = ([part for part in both if part.table.back is None] for both in (parts, others))
    if sum(part.bytes_per_token for part in growing) >= sum(part.bytes_per_token for part in fixed):
        return ENDLESS
    while not all(map(smaller, range(high, high + period))):
        high += period
    return max((tokens + 1 for tokens in range(1, high) if not smaller(tokens)), default=1)


def peak_bytes(parts: tuple[TableBytes, ...], tokens: int, chunk: int, page_size: int = 1) -> float:
    """Return the largest bytes of one sequence while it grows to `tokens`, in whole pages, where a step computes
    `chunk_tokens` of them."""
    return sum(part.table.most(tokens, chunk, page_size) * page_size * part.bytes_per_token for part in parts)


def longest_context(found: Memory, parts: tuple[TableBytes, ...], memory_bytes: int, page_size: int = 1) -> int | None:
    """Return the tokens to which each of `found.batch` sequences may grow so that all fit into `memory_bytes`; None
    where windows keep any number."""
    room = (memory_bytes - found.weight_bytes - found.activation_bytes) // found.batch

    def fits(tokens: int) -> bool:
        return math.ceil(peak_bytes(parts, tokens, 1, page_size)) <= room

    if fits(ENDLESS):
        return None
    return bisect.bisect_left(range(1, ENDLESS), True, key=lambda tokens: not fits(tokens))


def weight_bytes(spec: ModelSpec, itemsize: int, format: WeightFormat = WeightFormat()) -> int:  # noqa: B008
    """Return the bytes of all parameters as they are stored: matrices of blocks and head as `format` says, the others
    dense."""
    return _weight_bytes(cast(Hashable, spec), itemsize, format)


def widest_columns(spec: ModelSpec) -> int:
    """Return how many numbers a token has at once within the largest layer."""
    return _widest_columns(cast(Hashable, spec))


# Counted once, since a slider asks for the same again and again. A ModelSpec is frozen, which pyright cannot see.
@functools.lru_cache(maxsize=64)
def _widest_columns(spec: Any) -> int:
    return max(max(_attention_columns(kind), _feedforward_columns(kind)) for kind in set(spec.layers))


@functools.lru_cache(maxsize=64)
def _weight_bytes(spec: Any, itemsize: int, format: WeightFormat) -> int:
    total = 0
    for name, shape in parameter_shapes(spec).items():
        if name == "embedding.weight" and spec.tied and format.head != "dense":
            name = "head.weight"  # the one matrix of a tied model is stored as the head is
        kind = format.head if name == "head.weight" else format.blocks
        values, rows = math.prod(shape), math.prod(shape[:-1])
        if kind == "dense" or len(shape) != 2 or name == "embedding.weight" or name.endswith(DENSE):
            total += values * itemsize
        elif kind == "int8":
            total += values + rows * INT8_SCALE
        else:
            total += values // 2 + values // format.group * INT4_SCALE
    return total


def activation_bytes(spec: ModelSpec, rows: int, itemsize: int, samples: int | None = None) -> int:
    """Return the bytes of a step of `rows` tokens: rows in and out of a layer, the largest layer's own rows
    (attention's or the feed-forward's), and logits of `samples` rows (all unless given) in float32."""
    samples = rows if samples is None else samples
    return rows * (2 * spec.width + widest_columns(spec)) * itemsize + samples * 4 * spec.vocab


def _attention_columns(kind: LayerKind) -> int:
    """Return how many numbers a token has in queries, keys, values, and attention's result."""
    spec = kind.attention
    if isinstance(spec, LatentAttention):
        return spec.down + spec.heads * (spec.dim + spec.latent) + spec.mixed
    return (2 * spec.heads + 2 * spec.groups) * spec.dim


def _feedforward_columns(kind: LayerKind) -> int:
    """Return the columns of both halves of the gate and of their product, over the experts that a token uses."""
    return 3 * kind.hidden * (1 if kind.experts is None else kind.experts.used)
