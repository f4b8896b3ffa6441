"""The map of experts is the events' counts: every cell says its own, an expert without rows is hatched, and sums over
steps are those of the steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.tiny import mixture_of, model_of, request, runner_of
from workbench.errors import WorkbenchError
from workbench.trace.events import ExpertsUsed, Stepped
from workbench.trace.recorder import Recorder
from workbench.widgets import ModelGraph
from workbench.widgets.model_graph.experts import ExpertTable, layer_use
from workbench.widgets.model_graph.experts_picture import draw_experts
from workbench.widgets.model_graph.view import MAX_EXPERT_STEPS


def events(counts: np.ndarray, first: int = 3) -> list[ExpertsUsed]:
    """Counts [step, layer, expert] as events."""
    return [
        ExpertsUsed(
            0.0, step=first + step, layers=tuple((2 * i, tuple(map(int, line))) for i, line in enumerate(layers))
        )
        for step, layers in enumerate(counts)
    ]


def test_a_layers_figures() -> None:
    use = layer_use(3, np.array([6, 0, 2, 0, -1]))
    assert (use.layer, use.busiest, use.even, use.unused) == (3, 0.75, 0.25, 2)
    assert "3.0x an even share, 2" in draw_experts([3], np.array([[6, 0, 2, 0]]), "x")


def test_a_run_is_shown_from_its_events_or_its_recorder() -> None:
    runner, recorder = runner_of(model_of(mixture_of(5, 2)), pages=80, page_size=8), Recorder()
    runner.telemetry.set_listener(recorder.record)
    runner.record_experts()
    live = ModelGraph(runner, tab="experts", ceilings="h100")
    assert live.tokens == runner.model.spec.max_position_embeddings < 256
    assert live.tabs == ("graph", "roofline", "experts") and "call runner.record_experts()" in live.picture()
    found = list(runner.stream([request("a", 9, 4)]))
    view, heard = ModelGraph(found), ModelGraph(recorder)
    assert view.tabs == heard.tabs == ("experts",)
    computed = sum(e.prefill_tokens + e.decode_tokens for e in found if isinstance(e, Stepped))
    rows = view.experts.rows()
    assert rows.shape == (2, 5) and rows.sum(axis=1).tolist() == [2 * computed] * 2
    assert view.picture() == heard.picture() == live.picture()
    first, *_, last = view.experts.steps
    assert (view.expert_step, view.steps.title) == (first - 1, f"all {len(view.experts.steps)} steps")
    view.expert_step = last
    view.redraw()
    assert view.steps.title == f"step {last}" and view.experts.rows(view.experts.steps[-1]).sum(axis=1).tolist() == [
        2,
        2,
    ]
    assert f"rows computed by each expert, step {view.experts.steps[-1]}" in view.picture()
    live.close()


def test_a_runners_experts_are_those_of_the_newest_steps_and_a_step_keeps_its_number() -> None:
    runner, counts = runner_of(model_of(mixture_of(5, 2))), np.ones((MAX_EXPERT_STEPS, 1, 5), int)
    view = ModelGraph(runner, tab="experts", ceilings="h100")
    for first, title in ((0, "step 40"), (30, "step 40"), (41, f"all {MAX_EXPERT_STEPS} steps")):
        for event in events(counts, first):
            view._on_event(event)
        assert view.experts.steps == tuple(range(first, first + MAX_EXPERT_STEPS))
        if first == 0:
            view.redraw()
            assert (view.expert_step, view.steps.title) == (-1, f"all {MAX_EXPERT_STEPS} steps")
            view.expert_step = 40
        view.redraw()
        assert view.steps.title == title and f"rows computed by each expert, {title}" in view.shown.content
    view.close()


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 70), st.randoms(use_true_random=False))
def test_rows_are_those_of_a_step_or_of_all(steps: int, layers: int, experts: int, shuffle) -> None:
    numbers = [shuffle.choice([0, 1, 7, 1200]) for _ in range(steps * layers * experts)]
    counts = np.array(numbers).reshape(steps, layers, experts)
    table = ExpertTable.from_events(events(counts))
    for step, expected in ((None, counts.sum(axis=0)), (3 + steps - 1, counts[-1])):
        assert np.array_equal(table.rows(step), expected)
    with pytest.raises(WorkbenchError, match=f"no step 99; there are 3 to {2 + steps}"):
        table.rows(99)
