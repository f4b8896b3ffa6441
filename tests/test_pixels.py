"""PNG files that hold what was drawn, and colours whose lightness is the amount."""

from __future__ import annotations

import base64

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.pixels import read
from workbench.pixels import colorize, data_uri, max_pool, png, upscale


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4), st.integers(1, 4), st.integers(0, 99))
def test_a_file_holds_its_pixels(rows: int, columns: int, down: int, across: int, seed: int) -> None:
    image = np.random.default_rng(seed).integers(0, 256, (rows, columns, 3), np.uint8)
    large = read(png(upscale(image, down, across)))
    assert large.shape == (rows * down, columns * across, 3) and np.array_equal(large[::down, ::across], image)
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
