"""PNG files that hold what was drawn, and colours whose lightness is the amount."""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from workbench.pixels import colorize, data_uri, max_pool, png, upscale


def read(data: bytes) -> np.ndarray:
    """A PNG file as pixels, each chunk's checksum looked at."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(data):
        (size,), name = struct.unpack(">I", data[at : at + 4]), data[at + 4 : at + 8]
        chunks[name] = data[at + 8 : at + 8 + size]
        assert struct.unpack(">I", data[at + 8 + size : at + 12 + size])[0] == zlib.crc32(name + chunks[name])
        at += 12 + size
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    columns, rows, *kind = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert kind == [8, 2, 0, 0, 0]
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(rows, 1 + 3 * columns)
    assert not lines[:, 0].any()
    return lines[:, 1:].reshape(rows, columns, 3)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4), st.integers(1, 4), st.integers(0, 99))
def test_a_file_holds_its_pixels(rows: int, columns: int, down: int, across: int, seed: int) -> None:
    image = np.random.default_rng(seed).integers(0, 256, (rows, columns, 3), np.uint8)
    large = upscale(image, down, across)
    assert np.array_equal(read(png(large))[::down, ::across], image)
    assert read(png(large)).shape == (rows * down, columns * across, 3)
    head, _, body = data_uri(image).partition(",")
    assert head == "data:image/png;base64" and np.array_equal(read(base64.b64decode(body)), image)


def test_more_is_lighter() -> None:
    ramp = colorize(np.linspace(0, 1, 200)[None]).astype(float)[0]
    lightness = ramp @ (0.2126, 0.7152, 0.0722)
    assert (np.diff(lightness) >= -0.8).all() and lightness[-1] - lightness[0] > 150
    assert tuple(ramp[0]) == (0, 34, 78) and tuple(ramp[-1]) == (254, 232, 56)
    assert tuple(colorize(np.array([[np.nan, 2.0, -1.0]]))[0].tolist()[0]) == (128, 128, 128)
    assert np.array_equal(colorize(np.array([[5.0]]), 5.0, 5.0), colorize(np.array([[0.0]])))


@given(st.integers(1, 300), st.integers(1, 40))
def test_the_largest_of_a_stretch_is_not_lost(columns: int, most: int) -> None:
    values = np.random.default_rng(columns).random((3, columns))
    found, step = max_pool(values, most)
    assert found.shape[1] <= most and found.shape[1] == -(-columns // step)
    for at in range(found.shape[1]):
        assert np.array_equal(found[:, at], values[:, at * step : (at + 1) * step].max(1))
