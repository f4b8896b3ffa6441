"""Read attention weights through one protocol, quantize them to bytes, and cut them into tiles on demand.

A source is a text computed whole, an inspection or plain arrays. Byte 0 marks a masked key; 1 to 255 encode the square
root of the weight. Coarser levels of tiles are maxima of finer ones.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from workbench.errors import WorkbenchError

MaskPredicate = Callable[
    [Any, Any], Any
]  # positions of queries and keys, which broadcast -> whether the query attends to the key
TILE_SIDE = 256  # cells along a tile's side
TILE_CACHE_BYTES = 64 * 2**20  # bytes of cached rows
ByteMatrix = np.ndarray  # uint8 [row, column]
ROWS_PER_STRIP = 256  # rows read at once, for all heads
LAYER_CACHE_BYTES = 128 * 2**20


class AttentionSource(Protocol):
    """A source of attention weights for some layers. Rows are queries at `positions`; columns are all positions of the
    text."""

    @property
    def positions(self) -> Sequence[int]:
        """Return each row's position in the text."""
        ...

    @property
    def token_ids(self) -> Sequence[int]:
        """Return the token ids of all columns, or nothing if only weights are known."""
        ...

    @property
    def columns(self) -> int: ...

    @property
    def layers(self) -> Sequence[int]: ...

    def num_heads(self, layer: int) -> int: ...

    def num_kv_heads(self, layer: int) -> int:
        """Return the number of KV heads; query heads that share a KV head are neighbours."""
        ...

    def window_and_sinks(self, layer: int) -> tuple[int | None, int]:
        """Return the sliding window in tokens (None: no window) and the number of sink tokens."""
        ...

    def read(self, layer: int, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return weights [head, row, column] of rows `begin` to `end`, and their mask ([row, column] or with heads).

        Columns beyond the reach of all these rows may be left out."""
        ...


class ArrayAttentionSource:
    """A source of given weights [head, row, column] by layer, for rows at `positions`. Without a mask, a weight of 0
    counts as masked."""

    def __init__(
        self,
        weights: Mapping[int, Any],
        positions: Sequence[int] | None = None,
        token_ids: Sequence[int] = (),
        num_kv_heads: Mapping[int, int] | None = None,
        windows_and_sinks: Mapping[int, tuple[int | None, int]] | None = None,
        masks: Mapping[int, MaskPredicate] | None = None,
    ):
        self._weights = {layer: np.asarray(each, dtype=np.float32) for layer, each in weights.items()}
        if not self._weights:
            raise WorkbenchError("AttentionView: no layer's weights were given; inspect with layers=None for all")
        shapes = {each.shape[1:] for each in self._weights.values()}
        if len(shapes) > 1 or any(each.ndim != 3 or not each.size for each in self._weights.values()):
            message = ", ".join(str(each.shape) for each in self._weights.values())
            raise WorkbenchError(
                f"AttentionView: weights are [layer, head, row, context], no side empty, not {message}"
            )
        rows, self.columns = shapes.pop()
        self.layers = tuple(self._weights)
        self.positions = tuple(range(self.columns - rows, self.columns)) if positions is None else tuple(positions)
        self.token_ids = tuple(token_ids)
        if len(self.positions) != rows or len(self.token_ids) not in (0, self.columns):
            message = f"{len(self.positions)} positions and {len(self.token_ids)} tokens"
            raise WorkbenchError(f"AttentionView: {message} for weights of {rows} rows over {self.columns} tokens")
        self._num_kv_heads, self._windows_and_sinks, self._masks = (
            num_kv_heads or {},
            windows_and_sinks or {},
            masks or {},
        )

    def num_heads(self, layer: int) -> int:
        return len(self._weights[layer])

    def num_kv_heads(self, layer: int) -> int:
        return self._num_kv_heads.get(layer, self.num_heads(layer))

    def window_and_sinks(self, layer: int) -> tuple[int | None, int]:
        return self._windows_and_sinks.get(layer, (None, 0))

    def read(self, layer: int, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        weights = self._weights[layer][:, begin:end]
        mask = self._masks.get(layer)
        if mask is None:
            return weights, weights > 0
        return weights, mask_cells(mask, self.positions[begin:end], self.columns)


class ComputedAttentionSource:
    """A source of the weights of a `TextAttention`: every position is a row, and the source grows with the text."""

    def __init__(self, text: Any):
        self.text = text
        self._attention = [kind.attention for kind in text.model.spec.layers]
        self.layers = tuple(range(len(self._attention)))

    @property
    def token_ids(self) -> Sequence[int]:
        return self.text.token_ids

    @property
    def columns(self) -> int:
        return len(self.text.token_ids)

    @property
    def positions(self) -> Sequence[int]:
        return range(self.columns)

    def num_heads(self, layer: int) -> int:
        return self._attention[layer].num_heads

    def num_kv_heads(self, layer: int) -> int:
        return getattr(self._attention[layer], "num_kv_heads", 1)

    def window_and_sinks(self, layer: int) -> tuple[int | None, int]:
        return self._attention[layer].sliding_window, self._attention[layer].num_sink_tokens

    def read(self, layer: int, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        weights = self.text.weights(layer, range(begin, end)).cpu().numpy()
        return weights, mask_cells(self.text.mask(layer), range(begin, end), end)


def source_of_inspection(found: Any, spec: Any) -> ArrayAttentionSource:
    """Return the source of a request's `Inspection`; without a model's `spec` its KV heads and masks are unknown."""
    known: dict[str, Any] = {}
    if spec is not None:
        from workbench.model.custom import build_mask

        attention = {layer: spec.layers[layer].attention for layer in found.weights}
        # An inspection may hold some heads only; the heads that share a KV head are known only if all are there.
        whole = {n: a for n, a in attention.items() if a.num_heads == len(found.weights[n])}
        known = {
            "num_kv_heads": {n: getattr(a, "num_kv_heads", 1) for n, a in whole.items()},
            "windows_and_sinks": {n: (a.sliding_window, a.num_sink_tokens) for n, a in attention.items()},
            "masks": {n: build_mask(a) for n, a in attention.items()},
        }
    weights = {n: each.cpu().numpy() for n, each in found.weights.items()}
    return ArrayAttentionSource(weights, found.positions, found.token_ids, **known)


def mask_cells(mask: MaskPredicate, positions: Sequence[int], columns: int) -> np.ndarray:
    """Return a mask as bool [row, column], combined with the causal mask."""
    import torch

    query, key = torch.tensor(list(positions), dtype=torch.long)[:, None], torch.arange(columns)[None]
    return ((key <= query) & mask(query, key)).expand(len(query), columns).numpy()


class TilePyramid:
    """A byte matrix [rows, columns] that is cut into tiles at several levels of detail.

    `read_rows(begin, end)` returns uint8 [end - begin, columns or fewer]; missing columns are 0. At level n a cell is
    the maximum of 2^n x 2^n cells, so that no peak is lost. Tile (level, row, column) begins at the cell (row, column)
    times `TILE_SIDE`. The rows used last are cached; `grow` extends the matrix. Threads may share a pyramid.
    """

    def __init__(
        self, rows: int, columns: int, read_rows: Callable[[int, int], ByteMatrix], max_bytes: int = TILE_CACHE_BYTES
    ):
        self.rows, self.columns = rows, columns
        self._read, self._max_bytes = read_rows, max_bytes
        self._strips: OrderedDict[tuple[int, int], ByteMatrix] = OrderedDict()
        self._lock = threading.RLock()

    @property
    def max_level(self) -> int:
        """Return the number of the coarsest level, at which the whole matrix is one tile."""
        return max(0, (max(self.rows, self.columns, 1) - 1) // TILE_SIDE).bit_length()

    def size(self, level: int) -> tuple[int, int]:
        """Return the number of rows and columns at a level."""
        return -(-self.rows // 2**level), -(-self.columns // 2**level)

    def tile(self, level: int, row: int, column: int) -> ByteMatrix:
        """Return the cells of one tile: up to `TILE_SIDE` x `TILE_SIDE`, fewer at the matrix's edge, none beyond it."""
        with self._lock:
            return self._strip(level, row)[:, column * TILE_SIDE : (column + 1) * TILE_SIDE]

    def downsample(self, max_side: int) -> ByteMatrix:
        """Return the whole matrix at the finest level with no side longer than `max_side`."""
        with self._lock:
            level = next(n for n in range(64) if max(self.size(n)) <= max_side)
            strips = [self._strip(level, n) for n in range(-(-self.size(level)[0] // TILE_SIDE))]
        return np.concatenate(strips) if strips else np.zeros((0, self.columns), np.uint8)

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(strip.nbytes for strip in self._strips.values())

    def grow(self, rows: int, columns: int) -> None:
        """Set a larger size of the matrix. New rows are at the bottom; new columns are on the right, and are 0 in the
        old rows."""
        with self._lock:
            for level, row in [key for key in self._strips if key[1] >= self.rows // (TILE_SIDE * 2 ** key[0])]:
                del self._strips[level, row]
            self.rows, self.columns = rows, columns

    def _strip(self, level: int, row: int) -> ByteMatrix:
        """Return the rows of the tiles (level, row, ...), as wide as the level."""
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


def quantize_weights(weights: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """Return weights between 0 and 1 as uint8, encoding their square root, because most weights of a long context are
    small."""
    return np.where(visible, 1 + np.rint(254 * np.sqrt(np.clip(weights, 0, 1))), 0).astype(np.uint8)


class LayerWeightBytes:
    """The weights of one layer as bytes, read on demand, with a cache of the latest rows. Threads may share it."""

    def __init__(self, source: AttentionSource, layer: int, max_bytes: int = LAYER_CACHE_BYTES):
        self._source, self._layer, self._max_bytes = source, layer, max_bytes
        self._strips: OrderedDict[int, np.ndarray] = OrderedDict()  # [head, row, column]
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(strip.nbytes for strip in self._strips.values())

    def rows(self, head: int, begin: int, end: int) -> np.ndarray:
        """Return bytes [row, column] of a head's rows `begin` to `end`, padded to the widest."""
        parts = []
        with self._lock:
            for number in range(begin // ROWS_PER_STRIP, -(-end // ROWS_PER_STRIP)):
                first = number * ROWS_PER_STRIP
                parts.append(self._strip(number, end)[head, max(begin - first, 0) : end - first])
        columns = max((part.shape[1] for part in parts), default=0)
        wide = [np.pad(part, [(0, 0), (0, columns - part.shape[1])]) for part in parts]
        return np.concatenate(wide) if wide else np.zeros((0, 0), np.uint8)

    def tiles_of_heads(self, heads: tuple[int, ...]) -> TilePyramid:
        """Return the tiles of some heads, stacked one below the other."""
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
        """Return a strip [head, row, column] up to row `end`; read a cached one again if the text has grown since."""
        found = self._strips.get(number)
        rows = min(ROWS_PER_STRIP, len(self._source.positions) - number * ROWS_PER_STRIP)
        if found is None or found.shape[1] < min(ROWS_PER_STRIP, end - number * ROWS_PER_STRIP):
            weights, seen = self._source.read(self._layer, number * ROWS_PER_STRIP, number * ROWS_PER_STRIP + rows)
            found = self._strips[number] = quantize_weights(weights, seen)
        self._strips.move_to_end(number)
        while sum(strip.nbytes for strip in self._strips.values()) > self._max_bytes and len(self._strips) > 1:
            self._strips.popitem(last=False)
        return found
