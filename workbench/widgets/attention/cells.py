"""Quantize attention weights to bytes for drawing.

0 marks a key that the query does not see; 1 to 255 are the square root of the weight.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np

from workbench.widgets.attention.source import AttentionSource
from workbench.widgets.attention.tiles import TilePyramid

ROWS_PER_STRIP = 256  # rows read at once, of all heads
LAYER_CACHE_BYTES = 128 * 2**20


def quantize_weights(weights: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """Weights of 0 to 1 as uint8. The root, because most weights of a long context are small."""
    return np.where(visible, 1 + np.rint(254 * np.sqrt(np.clip(weights, 0, 1))), 0).astype(np.uint8)


class LayerWeightBytes:
    """One layer's weights as bytes, read as they are wanted, the rows used last kept. Threads may share it."""

    def __init__(self, source: AttentionSource, layer: int, max_bytes: int = LAYER_CACHE_BYTES):
        self._source, self._layer, self._max_bytes = source, layer, max_bytes
        self._strips: OrderedDict[int, np.ndarray] = OrderedDict()  # [head, row, column]
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(strip.nbytes for strip in self._strips.values())

    def rows(self, head: int, begin: int, end: int) -> np.ndarray:
        """Return bytes [row, column] of rows `begin` to `end`, as wide as the last of them."""
        parts = []
        with self._lock:
            for number in range(begin // ROWS_PER_STRIP, -(-end // ROWS_PER_STRIP)):
                first = number * ROWS_PER_STRIP
                parts.append(self._strip(number, end)[head, max(begin - first, 0) : end - first])
        columns = max((part.shape[1] for part in parts), default=0)
        wide = [np.pad(part, [(0, 0), (0, columns - part.shape[1])]) for part in parts]
        return np.concatenate(wide) if wide else np.zeros((0, 0), np.uint8)

    def tiles_of_heads(self, heads: tuple[int, ...]) -> TilePyramid:
        """Return the tiles of some heads, one below the other."""
        source = self._source

        def read(begin: int, end: int) -> np.ndarray:
            count = len(source.positions) if len(heads) == 1 else tiles.rows // len(heads)
            cut = [begin, *(n for n in range(0, len(heads) * count, count or 1) if begin < n < end), end]
            runs = zip(cut, cut[1:], strict=False)
            parts = [self.rows(heads[a // count], a % count, a % count + b - a) for a, b in runs]
            wide = max(part.shape[1] for part in parts)
            return np.concatenate([np.pad(part, [(0, 0), (0, wide - part.shape[1])]) for part in parts])

        tiles = TilePyramid(len(heads) * len(source.positions), source.columns, read)
        return tiles

    def _strip(self, number: int, end: int) -> np.ndarray:
        """One that was read when the text was shorter is read again where rows are missing."""
        found = self._strips.get(number)
        rows = min(ROWS_PER_STRIP, len(self._source.positions) - number * ROWS_PER_STRIP)
        if found is None or found.shape[1] < min(ROWS_PER_STRIP, end - number * ROWS_PER_STRIP):
            weights, seen = self._source.read(self._layer, number * ROWS_PER_STRIP, number * ROWS_PER_STRIP + rows)
            found = self._strips[number] = quantize_weights(weights, seen)
        self._strips.move_to_end(number)
        while sum(strip.nbytes for strip in self._strips.values()) > self._max_bytes and len(self._strips) > 1:
            self._strips.popitem(last=False)
        return found
