"""Read a PNG file back, each chunk's checksum looked at."""

from __future__ import annotations

import struct
import zlib

import numpy as np

CHANNELS = {2: 3, 3: 1}  # by the kind of colour: red, green, blue; an index into a palette


def read_png(data: bytes) -> tuple[np.ndarray, dict[bytes, bytes]]:
    """Return pixels [row, column, channel] and the chunks by name; each chunk's checksum is looked at."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(data):
        (size,), name = struct.unpack(">I", data[at : at + 4]), data[at + 4 : at + 8]
        chunks[name] = data[at + 8 : at + 8 + size]
        assert struct.unpack(">I", data[at + 8 + size : at + 12 + size])[0] == zlib.crc32(name + chunks[name])
        at += 12 + size
    assert (list(chunks)[0], list(chunks)[-1]) == (b"IHDR", b"IEND")
    columns, rows, depth, kind, *rest = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert depth == 8 and rest == [0, 0, 0]
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(rows, 1 + columns * CHANNELS[kind])
    assert not lines[:, 0].any()
    return lines[:, 1:].reshape(rows, columns, CHANNELS[kind]), chunks


def read(data: bytes) -> np.ndarray:
    """Return the pixels of a file that holds nothing else: [row, column, channel]."""
    pixels, chunks = read_png(data)
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    return pixels
