"""The first right lane: a wrong or failing one is passed over with its reason, and what was found is remembered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from compiled_kernels import right
from compiled_kernels.lanes import Lane, LaneError, lane_problems
from compiled_kernels.right import FILE, right_lane

ARGUMENTS = {"tokens": 1, "heads": 2, "dim": 4, "dtype": torch.float32}


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> dict[Lane, str]:
    found: dict[Lane, str] = {}
    asked: list[Lane] = []

    def disagreement(suite, case, inputs, lane):
        asked.append(lane)
        if found.get(lane) == "raises":
            raise RuntimeError("it\n broke")
        return found.get(lane)

    monkeypatch.setattr(right, "disagreement", disagreement)
    monkeypatch.setattr(right, "lane_problems", lambda: dict.fromkeys(Lane))
    found["asked"] = asked  # type: ignore[index]
    return found


def test_the_first_that_is_right_is_taken_and_remembered(verdicts, tmp_path: Path) -> None:
    verdicts |= {Lane.MLIR: "output 0: far away", Lane.INDUCTOR: "raises"}
    lanes = (Lane.MLIR, Lane.INDUCTOR, Lane.EAGER)
    choice = right_lane("rotary", ARGUMENTS, lanes, tmp_path)
    assert choice.lane is Lane.EAGER and "mlir: output 0: far away" in choice.reason
    assert "inductor: RuntimeError: it broke" in choice.reason and verdicts["asked"] == list(lanes)
    assert right_lane("rotary", ARGUMENTS, lanes, tmp_path) == choice and len(verdicts["asked"]) == 3
    (entry,) = json.loads((tmp_path / FILE).read_text())["entries"].values()
    for damage in ({}, {**entry, "lane": "nope"}, {**entry, "refused": 3}, {**entry, "lane": "triton"}):
        (tmp_path / FILE).write_text(json.dumps({"entries": dict.fromkeys(["a"], damage)}))
        assert right_lane("rotary", ARGUMENTS, lanes, tmp_path) == choice


def test_where_none_is_right_that_is_an_error(verdicts, tmp_path: Path) -> None:
    verdicts[Lane.MLIR] = "output 0: far away"
    with pytest.raises(LaneError, match="rotary: no lane works for .*mlir: output 0: far away"):
        right_lane("rotary", ARGUMENTS, (Lane.MLIR,), tmp_path)
    with pytest.raises(LaneError, match="unknown operator"):
        right_lane("rotery", ARGUMENTS, (Lane.MLIR,), tmp_path)


def test_a_lane_is_really_run(tmp_path: Path) -> None:
    if problem := lane_problems()[Lane.MLIR]:
        pytest.skip(problem)
    assert right_lane("rotary", ARGUMENTS, (Lane.MLIR, Lane.EAGER), tmp_path).lane is Lane.MLIR
