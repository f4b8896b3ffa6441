"""Describe each layer's cache and its cache groups: one for dense layers, two for quantized ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from compiled_kernels.quantized_attention import PageFormat, Settling, bits_per_number
from workbench.cache.format import CacheFormat, LayerFormat
from workbench.cache.tables import Table
from workbench.errors import WorkbenchError

DENSE = LayerFormat()


@dataclass(frozen=True)
class CacheShape:
    """The cache of one layer: key/value heads, head size, window, format and cache groups.

    With a sliding window its queries see the last positions and the sink tokens only. A quantized layer keeps quantized
    tokens in `group` and all others, in full precision, in `residual_group`. With `num_value_columns` the values are
    the first columns of the keys and are not stored again (multi-head latent attention).
    """

    groups: int
    dim: int
    table: int = 0
    window: int | None = None
    sinks: int = 0
    format: LayerFormat = DENSE
    recent: int = 0
    shared: int | None = None

    @property
    def numbers(self) -> int:
        """Return the numbers of keys and values per token."""
        return (2 if self.shared is None else 1) * self.groups * self.dim

    @property
    def rule(self) -> Settling:
        """Return the rule that decides which positions a query reads quantized; a window's sinks stay in full
        precision."""
        return Settling(self.format.group, self.format.residual, max(self.format.sinks, self.sinks))

    @property
    def tables(self) -> dict[int, Table]:
        """Return the layer's cache groups by number."""
        if not self.format.packed:
            return {self.table: Table(back=self.window, first=self.sinks)}
        rule = self.rule
        packed = Table(back=self.window, lag=rule.lag, group=rule.group)
        recent = Table(back=rule.lag + rule.group, first=rule.first, stride=rule.group)
        return {self.table: packed, self.recent: recent}

    def bytes_per_token(self, dtype: torch.dtype) -> float:
        """Return num_kv_heads x head_dim x bytes of a key and a value.

        A quantized layer counts codes, scales and minima. With multi-head latent attention only the key counts.
        """
        if not self.format.packed:
            return self.numbers * dtype.itemsize
        return self.groups * self.dim * sum(self._bits(dtype)) / 8

    def recent_bytes(self, dtype: torch.dtype) -> int:
        """Return the most bytes that a sequence keeps in full precision beside its quantized tokens: residual and
        sinks."""
        rule = self.rule
        tokens = rule.lag + rule.group - 1 + rule.first if self.format.packed else 0
        return 2 * self.groups * self.dim * dtype.itemsize * tokens

    def table_bytes(self, table: int, dtype: torch.dtype) -> float:
        """Return the bytes of one token in one cache group."""
        if not self.format.packed or table == self.table:
            return self.bytes_per_token(dtype) if table == self.table else 0
        return 2 * self.groups * self.dim * dtype.itemsize if table == self.recent else 0

    def page_formats(self, size: int) -> tuple[PageFormat, PageFormat]:
        """Return the page formats of quantized keys and values; WorkbenchError for heads that do not fit them."""
        keys, values = self.format.kinds
        columns = min(self.format.columns, self.dim)
        for name, kind, each in (("keys", keys, 8 if keys == "int4" else 4), ("values", values, columns)):
            if kind != "dense" and self.dim % each:
                raise WorkbenchError(f"cache: {kind} {name} are packed {each} columns at a time; heads have {self.dim}")
        if self.format.rotate and self.dim & (self.dim - 1):
            told = f"a Hadamard matrix turns heads whose width is a power of two, not {self.dim}"
            raise WorkbenchError(f"cache.rotate: {told}")
        made = self.groups, self.dim, size
        return PageFormat(keys, True, *made, self.format.group), PageFormat(values, False, *made, columns)

    def _bits(self, dtype: torch.dtype) -> tuple[float, float]:
        runs = self.format.group, min(self.format.columns, self.dim)
        keys, values = self.format.kinds
        return bits_per_number(keys, runs[0], dtype), bits_per_number(values, runs[1], dtype)


def shapes_of(
    layers: Iterable[tuple[int, int, int | None, int, int | None]], format: CacheFormat | None = None
) -> tuple[CacheShape, ...]:
    """Build the specs of layers given as (groups, dim, window, sinks, shared); equal layers share cache groups.

    A layer whose window lies within the residual would never read quantized tokens, so it stays dense.

    Raises:
        WorkbenchError: for multi-head latent attention with a quantized format.
    """
    numbers: dict[CacheShape, tuple[int, int]] = {}
    shapes, taken = [], 0
    for index, (groups, dim, window, sinks, shared) in enumerate(layers):
        mine = DENSE if format is None else format.of(index)
        if not mine.packed or (window is not None and window <= mine.residual):
            mine = DENSE
        if mine.packed and shared is not None:
            raise WorkbenchError(f"cache: layer {index} keeps latent rows, which have no {mine} form; keep it dense")
        shape = CacheShape(groups, dim, 0, window, sinks, mine, shared=shared)
        if shape not in numbers:
            numbers[shape] = taken, taken + mine.packed
            taken += 1 + mine.packed
        table, recent = numbers[shape]
        shapes.append(replace(shape, table=table, recent=recent))
    return tuple(shapes)
