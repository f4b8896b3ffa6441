"""Numbers as pixels: a colour map that colour-blind readers read alike, and PNG files. Only numpy is needed."""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np

# Ten colours of cividis, evenly spaced (Nunez, Anderton, Renslow 2018); others lie between them.
CIVIDIS = np.array([
    (0, 34, 78), (18, 53, 112), (59, 73, 108), (87, 93, 109), (112, 113, 115),
    (138, 134, 120), (165, 156, 116), (195, 179, 105), (225, 204, 85), (254, 232, 56),
], np.float64)  # fmt: skip


def coloured(values: np.ndarray, low: float = 0.0, high: float = 1.0) -> np.ndarray:
    """`values` [row, column] as colours [row, column, 3] in bytes: `low` and below is dark blue, `high` and above
    yellow. What is not a number is grey."""
    span = high - low or 1.0
    place = np.clip((np.nan_to_num(values) - low) / span, 0.0, 1.0) * (len(CIVIDIS) - 1)
    below = np.minimum(place.astype(int), len(CIVIDIS) - 2)
    part = (place - below)[..., None]
    found = np.round(CIVIDIS[below] * (1 - part) + CIVIDIS[below + 1] * part).astype(np.uint8)
    found[np.isnan(values)] = 128
    return found


def enlarged(image: np.ndarray, down: int, across: int) -> np.ndarray:
    """Each pixel of `image` [row, column, ...] as a block of `down` x `across`."""
    return image.repeat(down, 0).repeat(across, 1)


def pooled(values: np.ndarray, most: int) -> tuple[np.ndarray, int]:
    """`values` [row, column] with at most `most` columns: each is the largest of so many that lie side by side."""
    step = -(-values.shape[1] // most)
    missing = -values.shape[1] % step
    padded = np.pad(values, ((0, 0), (0, missing)), mode="edge") if missing else values
    return padded.reshape(len(values), -1, step).max(2), step


def png(image: np.ndarray) -> bytes:
    """`image` [row, column, 3] in bytes as a PNG file (ISO/IEC 15948)."""
    rows, columns, _ = image.shape
    lines = np.zeros((rows, 1 + 3 * columns), np.uint8)  # before each row the filter, 0: none
    lines[:, 1:] = image.reshape(rows, -1)
    head = struct.pack(">IIBBBBB", columns, rows, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(lines.tobytes(), 6)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, data) for name, data in parts)


def data_uri(image: np.ndarray) -> str:
    """`image` as an address that holds it whole."""
    return "data:image/png;base64," + base64.b64encode(png(image)).decode()


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
