"""Bytes as a picture with a table of colours, in a PNG's own words."""

from __future__ import annotations

import base64
import struct
import zlib
from functools import cache

import numpy as np

from workbench.widgets import kit


@cache
def table() -> bytes:
    """[256, 3]: what is 0 has no colour of its own, 1 to 255 go from dark to light (see kit.shade)."""
    return bytes(3) + b"".join(bytes.fromhex(kit.shade((n - 1) / 254)[1:]) for n in range(1, 256))


def png(cells: np.ndarray) -> bytes:
    """uint8 [row, column] as a PNG in the colours of `table`; 0 is transparent."""
    rows, columns = cells.shape
    head = struct.pack(">IIBBBBB", columns, rows, 8, 3, 0, 0, 0)
    lines = np.pad(cells, [(0, 0), (1, 0)]).tobytes()  # each line begins with its filter: none
    parts = (b"IHDR", head), (b"PLTE", table()), (b"tRNS", b"\0"), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(map(_chunk, parts))


def data_uri(cells: np.ndarray) -> str:
    return "data:image/png;base64," + base64.b64encode(png(cells)).decode()


def _chunk(part: tuple[bytes, bytes]) -> bytes:
    kind, body = part
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
