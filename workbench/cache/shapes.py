"""Describe each layer's cache and its cache groups: one for dense layers, two for quantized ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from compiled_kernels.quantized_attention import PageFormat, QuantizationRule, bits_per_number
from workbench.cache.format import CacheFormat, LayerFormat
from workbench.cache.tables import KVCacheGroup
from workbench.errors import WorkbenchError

DENSE = LayerFormat()


@dataclass(frozen=True)
class KVCacheSpec:
    """The cache of one layer: key/value heads, head size, window, format and cache groups.

    With a sliding window its queries see the last positions and the sink tokens only. A quantized layer keeps quantized
    tokens in `group` and all others, in full precision, in `residual_group`. With `num_value_columns` the values are
    the first columns of the keys and are not stored again (multi-head latent attention).
    """

    num_kv_heads: int
    head_dim: int
    group: int = 0
    sliding_window: int | None = None
    num_sink_tokens: int = 0
    format: LayerFormat = DENSE
    residual_group: int = 0
    num_value_columns: int | None = None

    @property
    def values_per_token(self) -> int:
        """Return the numbers of keys and values per token."""
        return (2 if self.num_value_columns is None else 1) * self.num_kv_heads * self.head_dim

    @property
    def quantization_rule(self) -> QuantizationRule:
        """Return the rule that decides which positions a query reads quantized; a window's sinks stay in full
        precision."""
        return QuantizationRule(self.format.group, self.format.residual, max(self.format.sinks, self.num_sink_tokens))

    @property
    def cache_groups(self) -> dict[int, KVCacheGroup]:
        """Return the layer's cache groups by number."""
        if not self.format.quantized:
            return {self.group: KVCacheGroup(sliding_window=self.sliding_window, num_sink_tokens=self.num_sink_tokens)}
        rule = self.quantization_rule
        packed = KVCacheGroup(sliding_window=self.sliding_window, residual_length=rule.residual_length, quant_group=rule.quant_group)
        recent = KVCacheGroup(sliding_window=rule.residual_length + rule.quant_group, num_sink_tokens=rule.num_sink_tokens, stride=rule.quant_group)
        return {self.group: packed, self.residual_group: recent}

    def bytes_per_token(self, dtype: torch.dtype) -> float:
        """Return num_kv_heads x head_dim x bytes of a key and a value.

        A quantized layer counts codes, scales and minima. With multi-head latent attention only the key counts.
        """
        if not self.format.quantized:
            return self.values_per_token * dtype.itemsize
        return self.num_kv_heads * self.head_dim * sum(self._bits(dtype)) / 8

    def residual_bytes(self, dtype: torch.dtype) -> int:
        """Return the most bytes that a sequence keeps in full precision beside its quantized tokens: residual and
        sinks."""
        rule = self.quantization_rule
        tokens = rule.residual_length + rule.quant_group - 1 + rule.num_sink_tokens if self.format.quantized else 0
        return 2 * self.num_kv_heads * self.head_dim * dtype.itemsize * tokens

    def group_bytes_per_token(self, group: int, dtype: torch.dtype) -> float:
        """Return the bytes of one token in one cache group."""
        if not self.format.quantized or group == self.group:
            return self.bytes_per_token(dtype) if group == self.group else 0
        return 2 * self.num_kv_heads * self.head_dim * dtype.itemsize if group == self.residual_group else 0

    def page_formats(self, page_size: int) -> tuple[PageFormat, PageFormat]:
        """Return the page formats of quantized keys and values; WorkbenchError for heads that do not fit them."""
        keys, values = self.format.key_value_formats
        columns = min(self.format.columns, self.head_dim)
        for name, kind, each in (("keys", keys, 8 if keys == "int4" else 4), ("values", values, columns)):
            if kind != "dense" and self.head_dim % each:
                raise WorkbenchError(f"cache: {kind} {name} are quantized {each} columns at a time; heads have {self.head_dim}")
        if self.format.rotate and self.head_dim & (self.head_dim - 1):
            message = f"a Hadamard matrix turns heads whose width is a power of two, not {self.head_dim}"
            raise WorkbenchError(f"cache.rotate: {message}")
        made = self.num_kv_heads, self.head_dim, page_size
        return PageFormat(keys, True, *made, self.format.group), PageFormat(values, False, *made, columns)

    def _bits(self, dtype: torch.dtype) -> tuple[float, float]:
        runs = self.format.group, min(self.format.columns, self.head_dim)
        keys, values = self.format.key_value_formats
        return bits_per_number(keys, runs[0], dtype), bits_per_number(values, runs[1], dtype)


def build_cache_specs(
    layers: Iterable[tuple[int, int, int | None, int, int | None]], format: CacheFormat | None = None
) -> tuple[KVCacheSpec, ...]:
    """Build the specs of layers given as (groups, dim, window, sinks, shared); equal layers share cache groups.

    A layer whose window lies within the residual would never read quantized tokens, so it stays dense.

    Raises:
        WorkbenchError: for multi-head latent attention with a quantized format.
    """
    numbers: dict[KVCacheSpec, tuple[int, int]] = {}
    shapes, taken = [], 0
    for index, (groups, dim, window, sinks, shared) in enumerate(layers):
        mine = DENSE if format is None else format.for_layer(index)
        if not mine.quantized or (window is not None and window <= mine.residual):
            mine = DENSE
        if mine.quantized and shared is not None:
            raise WorkbenchError(f"cache: layer {index} keeps latent rows, which have no {mine} form; keep it dense")
        shape = KVCacheSpec(groups, dim, 0, window, sinks, mine, num_value_columns=shared)
        if shape not in numbers:
            numbers[shape] = taken, taken + mine.quantized
            taken += 1 + mine.quantized
        table, recent = numbers[shape]
        shapes.append(replace(shape, group=table, residual_group=recent))
    return tuple(shapes)
