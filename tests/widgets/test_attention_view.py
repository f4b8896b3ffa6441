"""Attention as it is seen: nothing before its time, windows and sinks as the model has them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.tiny import VOCAB, layer, model_of, own_specs, request, runner_of, spec_of
from tests.helpers.widgets import SVG, root_of
from tests.thorough import tries
from workbench.engine.load import load
from workbench.engine.runner import Runner
from workbench.model.spec import ModelSpec
from workbench.request import Request
from workbench.widgets import AttentionView, RunnerThread
from workbench.widgets.attention.data import (
    ArrayAttentionSource,
    LayerWeightBytes,
    quantize_weights,
)
from workbench.widgets.attention.picture import HeatMap

WINDOWED = spec_of(layer(4, 2, sliding_window=5, num_sink_tokens=2), layer(4, 4))
IDS = tuple(n % VOCAB for n in range(7, 27))


@pytest.fixture(scope="module")
def demo() -> Runner:
    return load("demo", backend="eager")


@pytest.fixture
def runner() -> Iterator[Runner]:
    made = runner_of(model_of(WINDOWED))
    yield made
    RunnerThread.attach(made).stop()


@settings(max_examples=tries(10))
@given(own_specs, st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20))
def test_nothing_is_seen_outside_window_and_sinks(spec: ModelSpec, ids: list[int]) -> None:
    view = AttentionView(runner_of(model_of(spec)), ids, max_tokens=0)
    for number, kind in enumerate(spec.layers):
        view.layer, attention = number, kind.attention
        for view.head in range(attention.num_heads):
            weights, row = view.weights(), np.arange(len(ids))[:, None]
            column = np.arange(len(ids))[None]
            unseen = column > row
            if attention.sliding_window is not None:
                unseen = unseen | ((column <= row - attention.sliding_window) & (column >= attention.num_sink_tokens))
            assert not weights[unseen].any()
            cells = view.map.tiles if not view.throttle.flush() and view._last == (number, (view.head,)) else None
            assert cells is not None and not cells.tile(0, 0, 0)[unseen].any()
    view.close()


@given(st.lists(st.floats(0, 1), min_size=2, max_size=30))
def test_bytes_keep_the_order_of_weights_and_part_unseen_from_zero(weights: list[float]) -> None:
    ordered = np.sort(np.array(weights))
    cells = quantize_weights(ordered, np.ones(len(ordered), bool))
    assert (np.diff(cells.astype(int)) >= 0).all() and cells.min() >= 1
    assert abs(((cells - 1.0) / 254) ** 2 - ordered).max() < 0.005
    assert not quantize_weights(ordered, np.zeros(len(ordered), bool)).any()


@settings(max_examples=tries(30))
@given(st.integers(1, 9), st.integers(1, 3), st.integers(1, 3), st.data())
def test_rows_of_stacked_heads_are_those_of_the_heads(rows: int, groups: int, share: int, data: st.DataObject) -> None:
    weights = np.random.default_rng(0).random((groups * share, rows, rows + 2))
    cells = LayerWeightBytes(ArrayAttentionSource({0: weights}, num_kv_heads={0: groups}), 0)
    first = share * data.draw(st.integers(0, groups - 1))
    stacked = cells.tiles_of_heads(tuple(range(first, first + share)))
    expected = quantize_weights(weights[first : first + share], weights[first : first + share] > 0).reshape(
        -1, rows + 2
    )
    begin = data.draw(st.integers(0, len(expected) - 1))
    end = data.draw(st.integers(begin + 1, len(expected)))
    assert np.array_equal(stacked._read(begin, end), expected[begin:end])
    assert np.array_equal(stacked.tile(0, 0, 0), expected)


def test_a_text_is_followed_while_it_is_generated(runner: Runner) -> None:
    asked = Request("a", IDS[:6], request("x", 1, 12).sampling)
    view = AttentionView(runner, asked)
    assert view.wait() and view.source.columns == 18 and view.map.rows == 18
    alone = AttentionView(runner, view.source.token_ids, max_tokens=0)
    for number in range(2):
        view.layer = alone.layer = number
        assert abs(view.weights() - alone.weights()).max() < 1e-5
        small, large = (each._of(number, (0,)).downsample(256) for each in (view, alone))
        assert abs(small.astype(int) - large).max() <= 1
    view.close()


def test_an_inspection_shows_the_rows_that_were_asked_for() -> None:
    runner = runner_of(model_of(WINDOWED), page_size=64)
    runner.submit(request("a", 20, 12))
    while runner.tracker.sequences["a"].num_computed_tokens < 22:
        runner.step()
    found = runner.inspect("a", (21, 19))
    view = AttentionView(runner, found, layer=1, head=2)
    assert torch.equal(torch.tensor(view.weights()), found.weights[1][2])
    assert view.map.row_numbers == [21, 19] and view.map.rows == 2 and view.source.num_kv_heads(1) == 4
    plain = AttentionView(found)
    assert (plain.weights() == found.weights[0][0].numpy()).all()


def test_heads_that_share_keys_are_banded_and_stacked(runner: Runner) -> None:
    view = AttentionView(runner, IDS, max_tokens=0, head=3)
    view.stacked = True
    view.throttle.flush()
    assert view._last == (0, (2, 3)) and view.map.rows == 2 * len(IDS) and view.weights().shape == (2, 20, 20)
    view.layer = 1
    view.throttle.flush()
    assert view._last == (1, (3,))


def test_window_and_sinks_bound_what_is_seen(runner: Runner) -> None:
    """The lines run along the cells that are first seen: on their left nothing is, sinks apart."""
    view = AttentionView(runner, IDS, max_tokens=0)
    (_, *steps), (dash, (s0, _), (s1, _)) = view.map.marks
    assert s0 == s1 == 2 and dash and len(steps) == 2 * (len(IDS) - 5)
    cells = view.map.tiles.tile(0, 0, 0)
    for (edge, row), (same, below) in zip(steps[::2], steps[1::2], strict=True):
        assert same == edge and below == row + 1
        assert cells[row, edge] and cells[row, :2].all() and not cells[row, 2:edge].any()
    view.layer = 1
    view.throttle.flush()
    assert view.map.marks == []


def test_a_head_is_picked_and_a_cell_described(runner: Runner) -> None:
    view = AttentionView(runner, IDS, max_tokens=0)
    view.shown.picked = "head 2"
    view.map.pointed = [9, 3]
    assert view.head == 2 and "not looked at" in view.map.caption
    view.map.pointed = [9, 8]
    weight = view.weights()[9, 8]
    assert view.map.caption == f"head 2: from 9 to 8: weight {weight:.4f}"


def test_the_caption_is_of_the_cell_that_was_pointed_at_last() -> None:
    """A redraw describes the cell before, in another thread, while the pointer moves on."""

    def tell(row: int, column: int) -> str:
        if shown.pointed == [0, 0]:
            shown.pointed = [0, 1]
        return f"{row} {column}"

    shown = HeatMap(tell=tell, rows=1, columns=2)
    shown.pointed = [0, 0]
    assert shown.caption == "0 1"


def test_the_demo_models_tokens_stand_on_the_axes_escaped(demo: Runner) -> None:
    view = AttentionView(demo, "a <b>&\n\t  c", max_tokens=0)
    names = view.map.column_names
    assert "".join(names).replace("·", " ").replace("⏎", "\n").replace("⇥", "\t") == "a <b>&\n\t  c"
    shown = [each.text for each in root_of(view.picture()).iter(f"{SVG}text")]
    assert all(name in shown for name in names) and len(view.picture()) < 60_000


def test_quantized_caches_and_evictions_are_reported() -> None:
    packed = runner_of(model_of(spec_of(layer(dim=8))), page_size=8, cache=None)
    assert AttentionView(packed, IDS, max_tokens=0)._noted == ""
    quantized = load("shape:tiny", cache="int8", backend="eager")
    assert "quantized cache" in AttentionView(quantized, range(5), max_tokens=0).picture()


def test_layers_looked_at_before_are_let_go_where_all_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = np.random.default_rng(0).random((6, 2, 40, 40))
    view = AttentionView(weights)
    one, before = view._cached_bytes(), view.picture()
    monkeypatch.setattr("workbench.widgets.attention.view.VIEW_CACHE_BYTES", 3 * one)
    for number in (1, 2, 0, 3, 4, 5, 5, 0):
        view.layer = number
        view.throttle.flush()
        assert 0 < view._cached_bytes() <= 3 * one and number in view._cells
        assert {layer for layer, _ in view._tiles} == set(view._cells)
    assert set(view._cells) == {4, 5, 0} and view.picture() == before  # what was let go is made again
    view.close()
