"""Hold the parts of this folder to the workbench's laws: run `pytest` here after each change."""

from __future__ import annotations

from pathlib import Path

import pytest

import workbench
from workbench.testing import check_attention, check_sampler

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def in_this_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)  # paths in first.yaml begin here


def test_the_mask_keeps_the_laws() -> None:
    small = {"near": 4, "step": 2}  # the kit's texts are short
    # Without `backends` it is held to all of them, which takes longer.
    check_attention("mask.py:Dilated", examples=3, arguments=small, backends=["eager", "mlir"]).raise_if_failed()


def test_the_filter_keeps_the_laws() -> None:
    check_sampler("sampler.py:TopA").raise_if_failed()


def test_the_experiment_can_be_read() -> None:
    experiment = workbench.Experiment.from_file("first.yaml")
    assert list(experiment.variants) == ["as it is", "my mask", "my filter"]


def test_the_model_writes_with_both() -> None:
    runner = workbench.load("demo", attention={"mask": "mask.py:Dilated"}, backend="eager")
    events = runner.stream("def fibonacci(n):\n", max_tokens=8, filters=[{"path": "sampler.py:TopA"}])
    assert "".join(event.text for event in events)
