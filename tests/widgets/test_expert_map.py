"""The map of experts is the events' counts: every cell says its own, an expert without rows is hatched, and sums over
steps are those of the steps."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.tiny import mixture_of, model_of, request, runner_of
from workbench.trace.events import ExpertsUsed, Stepped
from workbench.trace.recorder import Recorder
from workbench.widgets import ExpertMap
from workbench.widgets.experts.data import layer_use
from workbench.widgets.experts.picture import draw_experts


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
    found = list(runner.stream([request("a", 9, 4)]))
    view, heard = ExpertMap(found), ExpertMap(recorder)
    computed = sum(e.prefill_tokens + e.decode_tokens for e in found if isinstance(e, Stepped))
    assert view.rows.shape == (2, 5) and view.rows.sum(axis=1).tolist() == [2 * computed] * 2
    assert np.array_equal(view.rows, heard.rows) and view.picture() == heard.picture()
    view.step = view.table.steps[-1]
    assert view.rows.sum(axis=1).tolist() == [2, 2] and "step" in view.picture()


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 70), st.randoms(use_true_random=False))
def test_rows_are_those_of_a_step_or_of_all(steps: int, layers: int, experts: int, shuffle) -> None:
    numbers = [shuffle.choice([0, 1, 7, 1200]) for _ in range(steps * layers * experts)]
    counts = np.array(numbers).reshape(steps, layers, experts)
    view = ExpertMap(events(counts))
    for view.step, expected in ((-1, counts.sum(axis=0)), (3 + steps - 1, counts[-1])):
        assert np.array_equal(view.rows, expected)
