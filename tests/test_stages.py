"""Long work says which stage it is at, and how long it will still take."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from workbench import progress
from workbench.experiment.experiment import Experiment
from workbench.figures.figure import Figure
from workbench.measure import compare_variants as comparison
from workbench.measure.compare_variants import run_comparison
from workbench.progress import Progress, ProgressStage, StageCounter, progress_stages


def test_the_time_that_is_left_follows_from_the_stages(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "is_terminal", lambda file: True)
    clock = iter(range(0, 10**6, 10))
    monkeypatch.setattr(Progress, "_time", staticmethod(lambda: next(clock)), raising=False)
    with progress_stages() as tell:
        tell("looking")
        work = StageCounter(tell, 4)
        for name in ("load", "one", "two", "three", "more than was thought"):
            work(name)
    lines = [line for line in re.split(r"[\r\n]+", capsys.readouterr().err) if line.strip()]
    assert lines[0].strip().startswith("[00:") or "looking" in lines[1]
    shares = [int(found[1]) for line in lines if (found := re.search(r"(\d+)%", line))]
    assert shares == sorted(shares) and {0, 25, 50, 75, 100} <= set(shares)
    assert "left" in lines[-1] and "100%" in lines[-1]


def test_a_stage_is_a_line_as_any_other() -> None:
    reported: list[str] = []
    work = StageCounter(reported.append, 2)
    for name in "abc":
        work(name)
    assert reported == ["a", "b", "c"]
    assert [(each.done, each.total) for each in reported if isinstance(each, ProgressStage)] == [(0, 2), (1, 2), (2, 2)]


@pytest.mark.parametrize(
    ("rounds", "workload"),
    [
        (2, "{kind: random, requests: 1, prompt_tokens: 4, output_tokens: 2}"),
        (1, "{kind: shared_prefix, requests: 1, prefix_tokens: 8, own_tokens: 2, output_tokens: 2}"),
    ],
    ids=["side by side", "shared prefix"],
)
def test_as_many_stages_are_reported_as_were_counted(
    rounds: int, workload: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[StageCounter] = []
    begin = StageCounter.__init__

    def noted(self: StageCounter, *args) -> None:
        begin(self, *args)
        counted.append(self)

    monkeypatch.setattr(StageCounter, "__init__", noted)
    monkeypatch.setattr(Figure, "render", lambda *_: b"")
    monkeypatch.setattr(comparison, "environment", dict)
    whole = f"""
question: a?
model: {{name: "shape:tiny"}}
backend: eager
workload: {workload}
measure: {{warmup: 0, rounds: {rounds}, ceilings: false}}
variants: {{a: {{}}, b: {{cache.page_size: 16}}}}
"""
    run_comparison(Experiment.from_yaml(whole), tmp_path, progress=False)
    assert counted and all(each._done == each._total for each in counted)


def test_nothing_warns_in_a_terminal(capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder) -> None:
    with progress_stages() as tell:
        tell("once")
    captured = capsys.readouterr()
    assert captured.out == "" and "IProgress" not in captured.err and not recwarn.list
    with progress_stages(False) as tell:
        tell("to no listener")
    assert capsys.readouterr() == ("", "")
