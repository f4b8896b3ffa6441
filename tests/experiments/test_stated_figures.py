"""The figures that sources state, against rooflines: what is called right, and that tables say what the rule reads."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.claims import stated_figures
from workbench.model.shapes import named_shape
from workbench.simulate.roofline import HARDWARE

POSITIVE = st.floats(1e-6, 1e6)


@given(POSITIVE, POSITIVE, POSITIVE, st.floats(0.05, 1.0))
def test_a_figure_is_right_where_it_meets_what_may_be_taken(a: float, b: float, bound: float, slack: float) -> None:
    """The interval of the figure and that from the bound to the slowest meet."""
    figure = stated_figures.StatedFigure("it", min(a, b), max(a, b))
    meets = max(figure.least, bound) <= min(figure.most, bound / slack)
    assert figure.is_right(bound, slack) == meets


def test_rooflines_by_hand() -> None:
    """2 P tokens over FLOP/s, and weights over bytes/s, in machines that are far from the crossing."""
    spec = named_shape("llama-3.1-8b")
    served = stated_figures.ServedModel("llama-3.1-8b", hardware="a100")
    embedding = spec.vocab_size * spec.hidden_size
    head_once = 2 * (spec.num_parameters - 2 * embedding) * 1000 / 312e12
    assert head_once < served.prefill(1000) < 1.05 * head_once
    assert served.decode(1) == pytest.approx(2 * (spec.num_parameters - embedding) / 2.039e12, rel=0.01)
    assert stated_figures.read_bytes("llama-3.1-8b", "16 bits", tokens=0) == 2 * (spec.num_parameters - embedding)
    # GPT-3, by its published count of 175 billion parameters: 350 GB in 16 bits.
    assert named_shape("gpt-3-175b").num_parameters == pytest.approx(175e9, rel=0.01)
    assert stated_figures.weights("gpt-3-175b", "16 bits") == pytest.approx(350e9, rel=0.01)


def test_a_batch_shares_the_weights_and_nothing_else() -> None:
    for model in stated_figures.MODELS:
        one, many = (stated_figures.read_bytes(model, "INT8", batch, 1000) for batch in (1, 32))
        cache = 1000 * stated_figures.cache_bytes(model)
        assert (one - cache) / 32 == pytest.approx(many - cache)


def test_what_does_not_fit_is_not_tried() -> None:
    assert not stated_figures.ServedModel("llama-3.1-70b", hardware="h100").fits(1000)
    assert stated_figures.ServedModel("llama-3.1-70b", "INT8", "h100").fits(1000)
    for each in stated_figures.served_models():
        room = each.gpus * HARDWARE[each.hardware].memory
        assert (
            stated_figures.weights(each.model, each.format) < room
            and named_shape(each.model).max_position_embeddings >= stated_figures.DEFAULT_CONTEXT
        )
    assert all(each.model.startswith("llama-3.1") for each in stated_figures.served_models(tokens=100_000))


@pytest.mark.parametrize("what", stated_figures.TRIED)
def test_the_tables_have_the_cases_for_which_a_figure_is_right(what: str) -> None:
    shares = stated_figures.right_shares(what)
    for cases, table in zip(stated_figures.TRIED[what](), stated_figures.right_cases(what), strict=True):
        for place, figure in enumerate(cases.figures, 1):
            shown = sum(len(str(row[place]).split("; ")) for row in table.rows if row[place] != "-")
            assert shown == round(shares[f"right, {figure.name}"] * len(cases.bounds)) and cases.bounds
    assert shares["least_right_share"] == min(v for name, v in shares.items() if name.startswith("right, "))


def test_the_sources_contradict_each_other() -> None:
    """The figures for one thing do not overlap: each source can be right only for its own machines."""
    for figures in (stated_figures.DECODE, stated_figures.PREFILL[1000]):
        ordered = sorted(figures, key=lambda figure: figure.least)
        assert all(a.most <= b.least for a, b in pairwise(ordered))
    ends = [figure.least for figure in stated_figures.DECODE], [figure.most for figure in stated_figures.DECODE]
    assert math.isclose(max(ends[0]) / min(ends[0]), 8)
