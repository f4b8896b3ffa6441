"""Estimate a model's memory from shapes: weights, cache, activations, and the cache bytes of each token by layer."""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, cast

from workbench.kv_cache.format import CacheFormat, KVCacheSpec, StateShape, build_cache_specs
from workbench.kv_cache.pages import KVCacheGroup
from workbench.model.attention_spec import AnyAttentionSpec, MLASpec
from workbench.model.custom import page_summaries
from workbench.model.model_parameters import parameter_shapes
from workbench.model.quantized import WeightFormat
from workbench.model.recurrent.spec import RecurrentSpec
from workbench.model.spec import LayerSpec, ModelSpec

UNLIMITED_TOKENS = 2**50  # tokens


@dataclass(frozen=True)
class KVGroupBytes:
    """The cache bytes of one group of layers: `bytes_per_token` for each stored position, or `state_bytes` for a
    recurrent state.
    """

    table: KVCacheGroup
    bytes_per_token: float
    state_bytes: int = 0

    def bytes(self, tokens: int, page_size: int = 1) -> float:
        """Return the bytes that one sequence of `tokens` tokens takes after its last token, in whole pages of
        `page_size`.
        """
        if self.table.is_recurrent:
            return self.peak_bytes(tokens, 1, page_size)
        first, others = self.table.pages_needed(tokens - 1, tokens, page_size)
        return (len(first) + len(others)) * page_size * self.bytes_per_token

    def peak_bytes(self, tokens: int, chunk_tokens: int, page_size: int = 1) -> float:
        """Return the peak bytes of one sequence while it grows to `tokens`, with at most `chunk_tokens` per step."""
        pages = self.table.max_pages(tokens, chunk_tokens, page_size)
        return pages * (page_size * self.bytes_per_token + self.state_bytes)


@dataclass(frozen=True)
class MemoryEstimate:
    """The memory, in bytes, of a model that serves `batch` sequences of `context` tokens.

    `cache_bytes_per_token` is the cost of a token while every layer stores it; with windows or residual formats the
    cache of a sequence is not proportional to its tokens.
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

    def max_sequences(self, memory_bytes: int) -> int:
        """Return the number of sequences of `context` tokens that fit into `memory_bytes` beside weights and
        activations.
        """
        return max(0, (memory_bytes - self.weight_bytes - self.activation_bytes) // self.sequence_bytes)


def estimate_memory(
    spec: ModelSpec,
    parts: tuple[KVGroupBytes, ...],
    context: int,
    batch: int = 1,
    itemsize: int = 2,
    format: WeightFormat = WeightFormat(),  # noqa: B008 (a frozen value)
    step_tokens: int = 512,
    page_size: int = 1,
) -> MemoryEstimate:
    """Estimate the memory of a model that serves a batch of sequences.

    Args:
        spec: the model.
        parts: cache cost of each group of layers.
        context: tokens of each sequence.
        batch: sequences.
        itemsize: bytes of a dense weight or activation.
        format: storage format of the matrices.
        step_tokens: tokens of the largest step; at least one per sequence is assumed.
        page_size: tokens per page.
    """
    return MemoryEstimate(
        context=context,
        batch=batch,
        parameters=spec.num_parameters,
        weight_bytes=weight_bytes(spec, itemsize, format),
        activation_bytes=activation_bytes(spec, max(step_tokens, batch), itemsize, samples=batch),
        **sum_of_parts(parts, context, page_size),
    )


def sum_of_parts(parts: tuple[KVGroupBytes, ...], context: int, page_size: int) -> dict[str, Any]:
    """Return `cache_bytes_per_token`, and `sequence_bytes` for a sequence of `context` tokens, for MemoryEstimate."""
    late = {layer for part in parts if part.table.is_delayed for layer in part.table.layers}
    lasting = [part for part in parts if part.table.is_delayed or not late.intersection(part.table.layers)]
    return {
        "cache_bytes_per_token": sum(part.bytes_per_token for part in lasting),
        "sequence_bytes": math.ceil(sum(part.bytes(context, page_size) for part in parts)),
    }


def break_even_context(
    parts: tuple[KVGroupBytes, ...], others: tuple[KVGroupBytes, ...], chunk_tokens: int, page_size: int = 1
) -> int:
    """Return the context in tokens above which the cache `parts` has smaller peak bytes for one sequence than the cache
    `others`, for steps of at most `chunk_tokens` tokens; `UNLIMITED_TOKENS` if that never happens.

    A quantized cache stores a step's tokens in full precision until the step has read them, so larger chunks shift the
    break-even to longer contexts.
    """

    def smaller(tokens: int) -> bool:
        return peak_bytes(parts, tokens, chunk_tokens, page_size) < peak_bytes(others, tokens, chunk_tokens, page_size)

    tables = [part.table for part in (*parts, *others)]
    period = math.lcm(page_size, *(each for table in tables for each in (table.quant_group, table.stride)))
    # Beyond `high`, each further period adds a table's bytes of one period, or none if it has a window.
    high = (
        max((table.sliding_window or 0) + table.residual_length + table.quant_group for table in tables)
        + chunk_tokens
        + 2 * page_size
    )
    growing, fixed = ([part for part in both if part.table.sliding_window is None] for both in (parts, others))
    if sum(part.bytes_per_token for part in growing) >= sum(part.bytes_per_token for part in fixed):
        return UNLIMITED_TOKENS
    while not all(map(smaller, range(high, high + period))):
        high += period
    return max((tokens + 1 for tokens in range(1, high) if not smaller(tokens)), default=1)


def peak_bytes(parts: tuple[KVGroupBytes, ...], tokens: int, chunk_tokens: int, page_size: int = 1) -> float:
    """Return the peak cache bytes of one sequence while it grows to `tokens`, in whole pages, with steps of
    `chunk_tokens` tokens.
    """
    return sum(part.peak_bytes(tokens, chunk_tokens, page_size) for part in parts)


def longest_context(
    found: MemoryEstimate, parts: tuple[KVGroupBytes, ...], memory_bytes: int, page_size: int = 1
) -> int | None:
    """Return the largest number of tokens that each of `found.batch` sequences can have, if they must fit into
    `memory_bytes` together; None if windows bound the cache at any length.
    """
    room = (memory_bytes - found.weight_bytes - found.activation_bytes) // found.batch

    def fits(tokens: int) -> bool:
        return math.ceil(peak_bytes(parts, tokens, 1, page_size)) <= room

    if fits(UNLIMITED_TOKENS):
        return None
    return bisect.bisect_left(range(1, UNLIMITED_TOKENS), True, key=lambda tokens: not fits(tokens))


def weight_bytes(spec: ModelSpec, itemsize: int, format: WeightFormat = WeightFormat()) -> int:  # noqa: B008 (a frozen value)
    """Return the stored bytes of all parameters: matrices of blocks and head in `format`, all other parameters
    dense.
    """
    return sum(weight_bytes_by_parameter(spec, itemsize, format).values())


def weight_bytes_by_parameter(spec: ModelSpec, itemsize: int, format: WeightFormat = WeightFormat()) -> dict[str, int]:  # noqa: B008 (a frozen value)
    """Return the stored bytes of each parameter, scales included."""
    return dict(_weight_bytes(cast(Hashable, spec), itemsize, format))


def max_layer_columns(spec: ModelSpec) -> int:
    """Return how many intermediate values a token needs in the layer that needs most."""
    return _widest_columns(cast(Hashable, spec))


# Cached, since a slider repeats the same call many times. A ModelSpec is hashable, which pyright cannot see.
@functools.lru_cache(maxsize=64)
def _widest_columns(spec: Any) -> int:
    return max(max(sum(map(_mixer_columns, kind.mixers)), _feedforward_columns(kind)) for kind in set(spec.layers))


@functools.lru_cache(maxsize=64)
def _weight_bytes(spec: Any, itemsize: int, format: WeightFormat) -> tuple[tuple[str, int], ...]:
    shapes = parameter_shapes(spec).items()
    return tuple((name, _stored_bytes(spec, name, shape, itemsize, format)) for name, shape in shapes)


def _stored_bytes(spec: ModelSpec, name: str, shape: tuple[int, ...], itemsize: int, format: WeightFormat) -> int:
    if name == "embedding.weight" and spec.tie_word_embeddings and not format.head.is_dense:
        name = "head.weight"  # the single matrix of a tied model is stored in the head's format
    if format.is_dense(name, len(shape)):
        return math.prod(shape) * itemsize
    *inner, columns = shape[1:]
    rows = ((n * math.prod(inner), own) for n, own in format.rows_of(name, shape))
    return sum(n * columns * itemsize if own.is_dense else own.nbytes(n, columns) for n, own in rows)


def activation_bytes(spec: ModelSpec, rows: int, itemsize: int, samples: int | None = None) -> int:
    """Return the activation bytes of a step of `rows` tokens: input and output rows of a layer, the largest
    intermediate rows of attention or feed-forward, and float32 logits of `samples` rows (default: all).
    """
    samples = rows if samples is None else samples
    return rows * (2 * spec.residual_columns + max_layer_columns(spec)) * itemsize + samples * 4 * spec.vocab_size


def _mixer_columns(spec: AnyAttentionSpec) -> int:
    """Return the numbers per token in queries, keys, values and attention's result, or in a recurrent layer."""
    if isinstance(spec, RecurrentSpec):
        return spec.num_columns
    if isinstance(spec, MLASpec):
        return spec.down_proj_columns + spec.num_heads * (spec.head_dim + spec.kv_lora_rank) + spec.o_proj_inputs
    return (2 * spec.num_heads + 2 * spec.num_own_kv_heads) * spec.head_dim


def _feedforward_columns(kind: LayerSpec) -> int:
    """Return the columns of gate, up projection and their product, summed over the experts of a token."""
    return 3 * kind.intermediate_size * (1 if kind.experts is None else kind.experts.num_experts_per_tok)


def cache_shapes(spec: ModelSpec, format: CacheFormat | None = None) -> tuple[KVCacheSpec, ...]:
    """Return the cache shape of each layer; dense if no `format` is given."""
    attentions = (kind.attention for kind in spec.layers)
    shared = ((a, a.kv_lora_rank if isinstance(a, MLASpec) else None) for a in attentions)
    layers = ((a.num_kv_heads, a.head_dim, a.sliding_window, a.num_sink_tokens, columns) for a, columns in shared)
    states, sources = zip(*((_state_shape(kind), kind.attention.kv_shared_with) for kind in spec.layers), strict=True)
    return build_cache_specs(layers, format, states, sources, [page_summaries(kind.attention) for kind in spec.layers])


def _state_shape(kind: LayerSpec) -> StateShape | None:
    return None if kind.recurrent is None else StateShape(kind.recurrent.state_shapes)
