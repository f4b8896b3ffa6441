"""What a model needs in memory, from shapes alone: weights, cache, activations."""

from __future__ import annotations

import math
from dataclasses import dataclass

from workbench.cache.tables import Table
from workbench.model.parameters import parameter_shapes
from workbench.model.quantized import WeightFormat
from workbench.model.spec import ModelSpec

INT8_SCALE, INT4_SCALE = 4, 2  # bytes of a scale


@dataclass(frozen=True)
class TableBytes:
    """What one table keeps: `bytes_per_token` of each position that lies in it."""

    table: Table
    bytes_per_token: float

    def bytes(self, tokens: int, page_size: int = 1) -> float:
        """Of one sequence of `tokens` tokens, in whole pages of `page_size`: what computing the last one needs."""
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
        """How many such sequences fit beside weights and activations into `memory_bytes`."""
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
    """`parts` are the cache's, `itemsize` bytes a number of dense weights and activations; the widest step computes
    `step_tokens` tokens, or one of each sequence."""
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


def weight_bytes(spec: ModelSpec, itemsize: int, format: WeightFormat = WeightFormat()) -> int:  # noqa: B008
    """Of all parameters as they are stored: matrices of blocks and head as `format` says, the others dense."""
    total = 0
    for name, shape in parameter_shapes(spec).items():
        if name == "embedding.weight" and spec.tied and format.head != "dense":
            name = "head.weight"  # the one matrix of a tied model is stored as the head is
        kind = format.head if name == "head.weight" else format.blocks
        values, rows = math.prod(shape), math.prod(shape[:-1])
        if kind == "dense" or len(shape) < 2 or name == "embedding.weight":
            total += values * itemsize
        elif kind == "int8":
            total += values + rows * INT8_SCALE
        else:
            total += values // 2 + values // format.group * INT4_SCALE
    return total


def activation_bytes(spec: ModelSpec, rows: int, itemsize: int, samples: int | None = None) -> int:
    """Of a step of `rows` tokens: rows in and out of a layer, the widest layer's own rows (attention's or the
    feed-forward's), and logits of `samples` rows (all unless given) in float32."""
    widest = max(
        max((2 * kind.attention.heads + 2 * kind.attention.groups) * kind.attention.dim, 3 * kind.hidden)
        for kind in spec.layers
    )
    samples = rows if samples is None else samples
    return rows * (2 * spec.width + widest) * itemsize + samples * 4 * spec.vocab
