"""A map in tiles is the map: a tile is the part of it that it says, its cells the largest of those they stand for."""

from __future__ import annotations

import base64

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.pixels import read_png
from tests.thorough import tries
from workbench import svg
from workbench.pixels import data_uri
from workbench.widgets.attention import data as tiles
from workbench.widgets.attention.data import TilePyramid
from workbench.widgets.attention.picture import HeatMap

SIZES = st.tuples(st.integers(1, 40), st.integers(1, 40))
SIDE = 4


@pytest.fixture(autouse=True, scope="module")
def small():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "TILE_SIDE", SIDE)
        yield


def noise(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (rows, columns), dtype=np.uint8)


def of(whole: np.ndarray, kept: int = 2**20) -> TilePyramid:
    rows, columns = whole.shape
    return TilePyramid(rows, columns, lambda begin, end: whole[begin:end], kept)


def largest(whole: np.ndarray, level: int, rows: slice, columns: slice) -> np.ndarray:
    """The specification: each cell the largest of its 2^level x 2^level, as far as there are such."""
    step = 2**level
    down, across = range(rows.start, rows.stop), range(columns.start, columns.stop)
    parts = [[whole[r * step : (r + 1) * step, c * step : (c + 1) * step] for c in across] for r in down]
    return np.array([[part.max() for part in line] for line in parts], dtype=np.uint8)


def check(found: TilePyramid, whole: np.ndarray, level: int, row: int, column: int) -> None:
    rows, columns = (-(-side // 2**level) for side in whole.shape)
    tall = slice(min(row * SIDE, rows), min((row + 1) * SIDE, rows))
    wide = slice(min(column * SIDE, columns), min((column + 1) * SIDE, columns))
    expected = largest(whole, level, tall, wide).reshape(tall.stop - tall.start, wide.stop - wide.start)
    assert np.array_equal(found.tile(level, row, column), expected)


PLACES = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5), st.integers(0, 5)), max_size=12)


@given(SIZES, PLACES, st.sampled_from([1, 300, 2**20]))
def test_a_tile_is_the_pooled_part_of_the_whole(size: tuple[int, int], places: list, kept: int) -> None:
    whole = noise(*size)
    found = of(whole, kept)
    for place in places:
        check(found, whole, *place)


@given(SIZES, st.integers(4, 50))
def test_what_is_reduced_keeps_every_peak_and_is_no_coarser_than_it_must(size: tuple[int, int], most: int) -> None:
    whole = noise(*size)
    small = of(whole).downsample(most)
    level = next(n for n in range(9) if max(-(-side // 2**n) for side in size) <= most)
    assert np.array_equal(small, largest(whole, level, slice(0, small.shape[0]), slice(0, small.shape[1])))
    assert small.shape == tuple(-(-side // 2**level) for side in size) and small.max() == whole.max()


@given(st.lists(st.integers(1, 9), min_size=2, max_size=5), PLACES)
def test_what_grows_is_as_if_it_had_always_been(steps: list[int], places: list) -> None:
    """As a text does: rows below and columns on the right, where rows above are empty."""
    sizes = np.cumsum(steps)
    whole = np.tril(noise(sizes[-1], sizes[-1]))
    found = TilePyramid(sizes[0], sizes[0], lambda begin, end: whole[begin:end, : found.columns])
    for size in sizes:
        found.grow(size, size)
        for place in places:
            check(found, whole[:size, :size], *place)


def test_only_what_is_looked_at_is_read() -> None:
    read = []

    def rows(begin: int, end: int) -> np.ndarray:
        read.append((begin, end))
        return np.zeros((end - begin, 4096), np.uint8)

    found = TilePyramid(4096, 4096, rows)
    found.tile(0, 3, 700)
    found.tile(0, 3, 2)
    assert read == [(12, 16)]


def test_the_widget_answers_with_the_bytes_of_the_tiles_it_is_asked_for() -> None:
    whole, sent = noise(9, 11), []
    view = HeatMap()
    view.send = lambda content, buffers=None: sent.append((content, buffers))  # type: ignore[method-assign]
    view.show_tiles(of(whole), row_names=["a"] * 9)
    assert (view.rows, view.columns, view.top, view.row_names[0]) == (9, 11, 2, "a")
    view._handle_custom_msg({"want": [[0, 1, 2], [1, 0, 0]], "stamp": view.stamp}, [])
    assert [content["tile"] for content, _ in sent] == [[0, 1, 2], [1, 0, 0]]
    for content, (body,) in sent:
        expected = view.tiles.tile(*content["tile"])
        assert content["size"] == list(expected.shape) and body == expected.tobytes()
        assert content["stamp"] == view.stamp


def test_the_cell_pointed_at_is_described_as_long_as_it_is_there() -> None:
    view = HeatMap(tell="{}/{}".format)
    view.show_tiles(of(noise(5, 5)))
    view.pointed = [4, 2]
    assert view.caption == "4/2"
    view.show_tiles(of(noise(3, 5)))
    assert view.caption == ""
    before = view.frame
    view.show_tiles(view.tiles, reset_view=False)
    assert view.frame == before


@settings(max_examples=tries(20))
@given(SIZES)
def test_a_png_holds_the_cells_and_the_table_the_kits_colours(size: tuple[int, int]) -> None:
    cells = noise(*size)
    pixels, parts = read_png(base64.b64decode(data_uri(cells).partition(",")[2]))
    assert np.array_equal(pixels[:, :, 0], cells)
    colours = parts[b"PLTE"]
    assert (
        len(colours) == 768
        and "#" + colours[3:6].hex() == svg.cividis_colour(0)
        and "#" + colours[-3:].hex() == svg.cividis_colour(1)
    )
    assert parts[b"tRNS"] == b"\0"
