"""Compute the minimum FLOPs and bytes of a step from shapes: the two numbers of the roofline.

Causality, windows and grouped heads are counted exactly: a query reads its visible positions, and a key/value head is
read once for all query heads that share it. For a mixture of experts, the experts of one token are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from workbench.model.attention_spec import AnyAttentionSpec, MLASpec
from workbench.model.recurrent.spec import RecurrentSpec
from workbench.model.spec import ModelSpec


@dataclass(frozen=True)
class StepCostEstimate:
    flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: StepCostEstimate) -> StepCostEstimate:
        return StepCostEstimate(self.flops + other.flops, self.bytes + other.bytes)

    def seconds(self, flops_per_second: float, bytes_per_second: float) -> float:
        """Return the roofline's time in seconds: the longer of the time to compute and the time to move the bytes."""
        return max(self.flops / flops_per_second, self.bytes / bytes_per_second)


class StepCostModel:
    """The cost of steps of one model; all terms that do not depend on the step are computed once."""

    def __init__(self, spec: ModelSpec, block_value: float, head_value: float, cache_value: float):
        """Create the model from the bytes per value of the blocks' matrices (scales included), of the head and of the
        cache.
        """
        self.spec = spec
        self._block_value, self._head_value, self._cache_value = block_value, head_value, cache_value
        used = (
            sum(mixer.matrix_parameters(spec.hidden_size) for mixer in kind.mixers)
            + spec.hidden_size * kind.mlp_parameters_per_column[1]
            for kind in spec.layers
        )
        altup = 0 if spec.altup is None else len(spec.layers) * spec.altup.matrix_parameters(spec.hidden_size)
        self._block_weights = sum(used) + altup
        self._head_weights = spec.vocab_size * spec.hidden_size
        counts = Counter(mixer for kind in spec.layers for mixer in kind.mixers)
        self._kinds = tuple(_AttentionCost.from_spec(attention, layers) for attention, layers in counts.items())

    def __call__(self, spans: Iterable[tuple[int, int]], sampled: int) -> StepCostEstimate:
        """Return FLOPs and bytes of a step: `spans` are (start, length) pairs; `sampled` rows go through the head."""
        tokens, flops, read = 0, 0.0, 0.0
        for start, length in spans:
            tokens += length
            for kind in self._kinds:
                seen, touched = visible_pairs(start, length, kind.window, kind.sinks)
                flops += kind.flops_per_pair * seen
                moved = kind.cache_values_read * touched + kind.cache_values_written * length
                read += moved * self._cache_value + 2 * kind.state_bytes
                flops += kind.flops_per_token * length
        flops += 2.0 * tokens * self._block_weights + 2.0 * sampled * self._head_weights
        weights = self._block_weights * self._block_value + self._head_weights * self._head_value * bool(sampled)
        return StepCostEstimate(flops, weights + read)


@dataclass(frozen=True)
class _AttentionCost:
    """The costs of all layers with equal attention: FLOPs of a (query, key) pair, cached numbers of a position."""

    window: int | None
    sinks: int
    flops_per_pair: float
    cache_values_read: int
    cache_values_written: int
    flops_per_token: float = 0.0  # FLOPs per token of a recurrent state
    state_bytes: int = 0  # read once and written once by a span

    @classmethod
    def from_spec(cls, attention: AnyAttentionSpec, layers: int) -> _AttentionCost:
        if isinstance(attention, RecurrentSpec):
            return cls(None, 0, 0.0, 0, 0, layers * attention.state_flops, layers * attention.state_bytes)
        values = attention.kv_lora_rank if isinstance(attention, MLASpec) else attention.head_dim
        flops = layers * 2.0 * attention.num_heads * (attention.head_dim + values)
        moved = layers * attention.cache_values_read, layers * attention.cache_values_per_token
        return cls(attention.sliding_window, attention.num_sink_tokens, flops, *moved)


def visible_pairs(start: int, length: int, window: int | None, sinks: int = 0) -> tuple[int, int]:
    """Return, for the positions [start, start + length), the number of (query, key) pairs that attend, and the number
    of distinct positions read.
    """
    end = start + length
    if window is None or end <= window:
        return length * start + length * (length + 1) // 2, end
    short = max(0, min(end, window) - start)  # queries that still see all earlier positions
    pairs = short * start + short * (short + 1) // 2 + (length - short) * window
    pairs += _sinks_seen(end - window, sinks) - _sinks_seen(start - window, sinks)
    before = max(0, start - window + 1)  # positions outside of every query's window
    return pairs, end - before + min(sinks, before)


def _sinks_seen(past: int, sinks: int) -> int:
    """Return the sinks outside of the window, summed over the queries up to the one with `past` positions before its
    window.
    """
    rising = max(0, min(past, sinks))  # queries with fewer positions before their window than there are sinks
    return rising * (rising + 1) // 2 + max(0, past - sinks) * sinks
