"""Draw numbers as pixels with a colour map for colour-blind readers, and encode PNG files. Only numpy is needed."""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np

# Ten colours of cividis, evenly spaced (Nunez, Anderton, Renslow 2018); others are interpolated.
CIVIDIS = (
    (0, 34, 78), (18, 53, 112), (59, 73, 108), (87, 93, 109), (112, 113, 115),
    (138, 134, 120), (165, 156, 116), (195, 179, 105), (225, 204, 85), (254, 232, 56),
)  # fmt: skip


def colorize(values: np.ndarray, low: float = 0.0, high: float = 1.0) -> np.ndarray:
    """Map `values` [row, column] to colours, uint8 [row, column, 3].

    `low` and below is dark blue, `high` and above yellow, NaN grey.
    """
    span = high - low or 1.0
    place = np.clip((np.nan_to_num(values) - low) / span, 0.0, 1.0) * (len(CIVIDIS) - 1)
    below = np.minimum(place.astype(int), len(CIVIDIS) - 2)
    part, colours = (place - below)[..., None], np.array(CIVIDIS, np.float64)
    found = np.round(colours[below] * (1 - part) + colours[below + 1] * part).astype(np.uint8)
    found[np.isnan(values)] = 128
    return found


def upscale(image: np.ndarray, down: int, across: int) -> np.ndarray:
    """Repeat each pixel of `image` [row, column, ...] as a block of `down` x `across`."""
    return image.repeat(down, 0).repeat(across, 1)


def max_pool(values: np.ndarray, max_columns: int) -> tuple[np.ndarray, int]:
    """Reduce `values` [row, column] to at most `max_columns` columns by the maximum; also return the number of columns
    per maximum.
    """
    step = -(-values.shape[1] // max_columns)
    missing = -values.shape[1] % step
    padded = np.pad(values, ((0, 0), (0, missing)), mode="edge") if missing else values
    return padded.reshape(len(values), -1, step).max(2), step


def palette() -> bytes:
    """Return the table of 256 colours for bytes: 0 is transparent, 1 to 255 go from dark blue to yellow."""
    return bytes(3) + colorize(np.linspace(0.0, 1.0, 255)[None]).tobytes()


def png(image: np.ndarray) -> bytes:
    """Encode `image` as a PNG file (ISO/IEC 15948): [row, column, 3] in bytes, or [row, column] in the colours of
    `palette`."""
    rows, columns = image.shape[:2]
    lines = np.pad(image.reshape(rows, -1), [(0, 0), (1, 0)])  # each row starts with its filter; 0: none
    head = struct.pack(">IIBBBBB", columns, rows, 8, 2 if image.ndim == 3 else 3, 0, 0, 0)
    table = ((b"PLTE", palette()), (b"tRNS", b"\0")) if image.ndim == 2 else ()
    parts = ((b"IHDR", head), *table, (b"IDAT", zlib.compress(lines.tobytes(), 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, data) for name, data in parts)


def data_uri(image: np.ndarray) -> str:
    """Return `image` as a data URI."""
    return "data:image/png;base64," + base64.b64encode(png(image)).decode()


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
