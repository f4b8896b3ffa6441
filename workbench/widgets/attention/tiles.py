"""Cut a large byte matrix into tiles, made on demand; coarser levels are maxima of finer ones."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

TILE_SIDE = 256  # cells of a tile
TILE_CACHE_BYTES = 64 * 2**20  # bytes of rows kept

ByteMatrix = np.ndarray  # uint8 [row, column]


class TilePyramid:
    """`read(begin, end)` gives rows of the whole, uint8 [end - begin, columns or fewer]: what is missing is 0.

    At level n a cell is the largest of 2^n x 2^n, so that no peak is lost; tile (level, row, column) is the cells from
    (row, column) times SIDE on. Rows once read are kept, the last used ones; `grow` says that more have come. Threads
    may share it.
    """

    def __init__(self, rows: int, columns: int, read_rows: Callable[[int, int], ByteMatrix], max_bytes: int = TILE_CACHE_BYTES):
        self.rows, self.columns = rows, columns
        self._read, self._max_bytes = read_rows, max_bytes
        self._strips: OrderedDict[tuple[int, int], ByteMatrix] = OrderedDict()
        self._lock = threading.RLock()

    @property
    def max_level(self) -> int:
        """The coarsest level: one tile."""
        return max(0, (max(self.rows, self.columns, 1) - 1) // TILE_SIDE).bit_length()

    def size(self, level: int) -> tuple[int, int]:
        """Rows and columns at a level."""
        return -(-self.rows // 2**level), -(-self.columns // 2**level)

    def tile(self, level: int, row: int, column: int) -> ByteMatrix:
        """Up to SIDE x SIDE cells; empty beyond the edge."""
        with self._lock:
            return self._strip(level, row)[:, column * TILE_SIDE : (column + 1) * TILE_SIDE]

    def downsample(self, max_side: int) -> ByteMatrix:
        """The whole, as fine as it is with no side longer than `most`."""
        with self._lock:
            level = next(n for n in range(64) if max(self.size(n)) <= max_side)
            strips = [self._strip(level, n) for n in range(-(-self.size(level)[0] // TILE_SIDE))]
        return np.concatenate(strips) if strips else np.zeros((0, self.columns), np.uint8)

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(strip.nbytes for strip in self._strips.values())

    def grow(self, rows: int, columns: int) -> None:
        """Rows were added below, and columns on the right that rows above them do not fill."""
        with self._lock:
            for level, row in [key for key in self._strips if key[1] >= self.rows // (TILE_SIDE * 2 ** key[0])]:
                del self._strips[level, row]
            self.rows, self.columns = rows, columns

    def _strip(self, level: int, row: int) -> ByteMatrix:
        """The rows of cells that the tiles (level, row, ...) have: as wide as the level."""
        rows, columns = self.size(level)
        begin, end = row * TILE_SIDE, min(rows, (row + 1) * TILE_SIDE)
        if begin >= end:
            return np.zeros((0, columns), np.uint8)
        found = self._strips.get((level, row))
        if found is None:
            if level:
                halves = (_max_pool(self._strip(level - 1, 2 * row + n)) for n in (0, 1))
                found = np.concatenate([half for half in halves if len(half)])
            else:
                found = self._read(begin, end)
            self._strips[level, row] = found
            self._trim()
        self._strips.move_to_end((level, row))
        return _pad_columns(found, columns)

    def _trim(self) -> None:
        size = sum(strip.nbytes for strip in self._strips.values())
        while size > self._max_bytes and len(self._strips) > 1:
            size -= self._strips.popitem(last=False)[1].nbytes


def _max_pool(cells: ByteMatrix) -> ByteMatrix:
    padded = np.pad(cells, [(0, side % 2) for side in cells.shape])
    rows, columns = padded.shape
    return padded.reshape(rows // 2, 2, columns // 2, 2).max((1, 3))


def _pad_columns(cells: ByteMatrix, columns: int) -> ByteMatrix:
    return cells if cells.shape[1] == columns else np.pad(cells, [(0, 0), (0, columns - cells.shape[1])])
