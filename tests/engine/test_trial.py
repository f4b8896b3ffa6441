"""The decode lane of `auto`: the quickest that is right, remembered only where nothing disturbed the trial."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from compiled_kernels import Lane
from compiled_kernels.choice import Choice
from compiled_kernels.remembered import Remembered
from tests.engine.tiny import model_of, spec_of
from workbench.engine import trial
from workbench.engine.executors import EagerExecutor
from workbench.engine.lanes import Lanes
from workbench.errors import WorkbenchError

BOTH = Lanes(Lane.MLIR, Lane.EAGER, Lane.MLIR, "auto")


class Clock:
    """Stands for the time module; executors move it on."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Timed(EagerExecutor):
    def __init__(self, model, store, clock: Clock, seconds: float, wrong: bool):
        super().__init__(model, store)
        self.clock, self.seconds, self.wrong = clock, seconds, wrong

    def forward(self, plan):
        self.clock.now += self.seconds
        rows = super().forward(plan)
        return rows.flip(-1) if self.wrong else rows


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    kept = Remembered(tmp_path / "lanes.json")

    def run(mlir: float = 1.0, eager: float = 2.0, wrong: bool = False, fails: bool = False) -> Lanes:
        clock = Clock()

        def executor_for(model, store, lanes):
            lane = lanes.decode
            if fails and lane is Lane.MLIR:
                raise WorkbenchError("not for this model")
            return Timed(model, store, clock, mlir if lane is Lane.MLIR else eager, wrong and lane is Lane.MLIR)

        monkeypatch.setattr(trial, "executor_for", executor_for)
        monkeypatch.setattr(trial, "time", clock)
        monkeypatch.setattr(trial, "best_lane", lambda operator, arguments, lanes: Choice(lanes[0], "as told"))
        return trial.measured(BOTH, model_of(spec_of()), 4, kept)

    return run, kept


def test_the_quickest_decodes_and_says_how_quick(tried) -> None:
    run, _ = tried
    lanes = run(mlir=0.001, eager=0.002)
    assert (lanes.decode, lanes.blocks) == (Lane.MLIR, Lane.EAGER)
    assert lanes.reason == "auto: a decode step takes mlir 1.00 ms, eager 2.00 ms; attention of 512 tokens as told"


def test_the_other_one_where_it_is_quicker(tried) -> None:
    run, _ = tried
    assert run(mlir=3.0, eager=2.0).decode == Lane.EAGER


def test_a_lane_that_is_wrong_or_fails_is_not_chosen(tried) -> None:
    run, kept = tried
    assert run(wrong=True).decode == Lane.EAGER
    kept.file.unlink()
    lanes = run(fails=True)
    assert lanes.decode == Lane.EAGER
    assert "mlir not chosen: not for this model" in lanes.reason


def test_it_is_tried_once_and_a_damaged_memory_is_made_anew(tried) -> None:
    run, kept = tried
    run(mlir=1.0, eager=2.0)
    assert run(mlir=9.0, eager=2.0).decode == Lane.MLIR, "remembered"
    entries = json.loads(kept.file.read_text())["entries"]
    kept.file.write_text(json.dumps({"entries": {key: {"seconds": {"mlir": -1}} for key in entries}}))
    assert run(mlir=9.0, eager=2.0).decode == Lane.EAGER
    kept.file.write_text("{")
    assert run(mlir=1.0, eager=2.0).decode == Lane.MLIR


def test_a_disturbed_trial_is_not_remembered(tried, monkeypatch: pytest.MonkeyPatch) -> None:
    run, kept = tried
    monkeypatch.setattr(trial.statistics, "median", lambda values: 2 * min(values))
    assert run().decode == Lane.MLIR
    assert not kept.file.exists()


def test_one_lane_needs_no_trial() -> None:
    alone = Lanes.one(Lane.EAGER, "auto")
    assert trial.measured(alone, model_of(spec_of()), 4) is alone


def test_other_models_are_other_entries() -> None:
    keys = {
        trial._key(model, BOTH, size)
        for model in (model_of(spec_of()), model_of(spec_of(tied=False)), model_of(spec_of(), dtype=torch.float64))
        for size in (4, 8)
    }
    assert len(keys) == 6
