"""The lane `auto`: what it chooses follows from what was measured, and is remembered."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import compiled_kernels.choice as choice_module
from compiled_kernels.cases import suite_of
from compiled_kernels.choice import CLEARLY, FILE, TIE, TRIALS, best_lane
from compiled_kernels.lanes import Lane, LaneError, lane_problems
from compiled_kernels.measure import Measurement, Timing
from compiled_kernels.remembered import Remembered

LANES = (Lane.EAGER, Lane.INDUCTOR, Lane.MLIR)
ARGUMENTS = {"tokens": 1, "heads": 2, "dim": 4, "dtype": torch.float32}
some_seconds = st.dictionaries(st.sampled_from(LANES), st.floats(1e-6, 1.0))


class Measured:
    """Stands in for `measure`, and counts how often it was asked."""

    def __init__(self, seconds: dict[Lane, float]):
        self.seconds, self.asked, self.median = seconds, 0, 1.1  # of the 10th percentile

    def __call__(self, suite: Any, case: Any, lanes: list[Lane], **_: Any) -> Measurement:
        self.asked += 1
        quick = {lane: self.seconds[lane] for lane in lanes if lane in self.seconds}
        timings = {lane: Timing(self.median * seconds, seconds, 9, 5) for lane, seconds in quick.items()}
        return Measurement("cache", 1, 1, timings, {lane: "wrong" for lane in lanes if lane not in timings})


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Measured:
    found = Measured({Lane.EAGER: 8e-5, Lane.INDUCTOR: 4.4e-5, Lane.MLIR: 3.1e-5})
    monkeypatch.setattr(choice_module, "measure", found)
    monkeypatch.setattr(choice_module, "lane_problems", lambda: {**dict.fromkeys(Lane), Lane.TRITON: "no GPU"})
    return found


def test_the_fastest_is_chosen_and_the_reason_says_why(machine: Measured, tmp_path: Path) -> None:
    choice = best_lane("rotary", ARGUMENTS, tuple(Lane), tmp_path)
    assert choice.lane is Lane.MLIR and choice.seconds == machine.seconds
    assert choice.reason.startswith("mlir: 31.0 us, inductor: 44.0 us, eager: 80.0 us, triton not timed: no GPU, meas")
    assert "1 threads on" in choice.reason


@given(some_seconds, st.permutations(LANES))
def test_no_other_lane_is_much_faster_than_the_chosen(seconds: dict[Lane, float], lanes: list[Lane]) -> None:
    entry = {"seconds": {str(k): v for k, v in seconds.items()}, "refused": {}, "measured": "now"}
    choice = choice_module._choice(entry, tuple(lanes))
    if not seconds:
        assert choice is None
        return
    assert choice is not None and choice.lane in seconds
    for lane, value in seconds.items():
        assert value >= seconds[choice.lane] * (CLEARLY if lane is Lane.EAGER else TIE) * (1 - 1e-9)
        if choice.lane is Lane.EAGER and lanes.index(lane) < lanes.index(Lane.EAGER):
            assert seconds[choice.lane] <= value * CLEARLY / TIE * (1 + 1e-9)


def test_a_disturbed_measurement_is_made_again_and_the_least_counts(machine: Measured, tmp_path: Path) -> None:
    machine.median = 5.0
    assert best_lane("rotary", ARGUMENTS, LANES, tmp_path).seconds == machine.seconds
    assert machine.asked == TRIALS


def test_it_is_measured_once(machine: Measured, tmp_path: Path) -> None:
    first = best_lane("rotary", ARGUMENTS, LANES, tmp_path)
    assert best_lane("rotary", ARGUMENTS, LANES, tmp_path) == first and machine.asked == 1
    best_lane("rotary", {**ARGUMENTS, "tokens": 2}, LANES, tmp_path)
    best_lane("rotary", {**ARGUMENTS, "dtype": torch.bfloat16}, LANES, tmp_path)
    best_lane("rotary", ARGUMENTS, LANES[:2], tmp_path)
    assert machine.asked == 4
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        best_lane("rotary", ARGUMENTS, LANES, tmp_path)
    finally:
        torch.set_num_threads(threads)
    assert machine.asked == 5


def test_another_machine_or_other_code_measures_again(
    machine: Measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best_lane("rotary", ARGUMENTS, LANES, tmp_path)
    monkeypatch.setattr(choice_module, "machine", lambda: {"cpu": "another"})
    best_lane("rotary", ARGUMENTS, LANES, tmp_path)
    assert machine.asked == 2


def test_where_nothing_works_it_says_why(machine: Measured, tmp_path: Path) -> None:
    machine.seconds = {}
    with pytest.raises(LaneError, match="rotary: no lane works for .*eager: wrong"):
        best_lane("rotary", ARGUMENTS, LANES, tmp_path)
    with pytest.raises(LaneError, match="unknown operator 'rotery'; did you mean 'rotary'"):
        best_lane("rotery", ARGUMENTS, LANES, tmp_path)
    assert not (tmp_path / FILE).exists()


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"\xff\xfe", b"[]", b'{"entries": 5}', b'{"entries": {"a": {}}}', None, "entry"]
)
def test_a_damaged_file_is_made_anew(damage: Any, machine: Measured, tmp_path: Path) -> None:
    best_lane("rotary", ARGUMENTS, LANES, tmp_path)
    file = tmp_path / FILE
    if damage is None:
        file.unlink()
    elif damage == "entry":
        kept = json.loads(file.read_text())["entries"]
        broken = {key: {**entry, "seconds": {"eager": "NaN"}} for key, entry in kept.items()}
        file.write_text(json.dumps({"entries": broken}))
    else:
        file.write_bytes(damage)
    assert best_lane("rotary", ARGUMENTS, LANES, tmp_path).lane is Lane.MLIR
    assert machine.asked == 2
    best_lane("rotary", ARGUMENTS, LANES, tmp_path)
    assert machine.asked == 2


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), lambda of: st.lists(of) | st.dictionaries(
    st.sampled_from(["seconds", "refused", "measured", "eager", "mlir"]), of)))  # fmt: skip
def test_no_entry_whatever_it_holds_makes_a_choice_without_figures(entry: Any) -> None:
    choice = choice_module._choice(entry, LANES)
    assert choice is None or all(0 < value < math.inf for value in choice.seconds.values())


def test_where_nothing_can_be_written_it_still_chooses(machine: Measured, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert best_lane("rotary", ARGUMENTS, LANES, tmp_path / "file").lane is Lane.MLIR


def test_writers_at_once_leave_a_whole_file(tmp_path: Path) -> None:
    kept = Remembered(tmp_path / FILE)

    def write(number: int) -> None:
        for entry in range(20):
            kept.add(f"{number}-{entry}", {"n": entry})

    writers = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert kept.file.exists() is False or json.loads(kept.file.read_text())["entries"] is not None
    assert set(kept.load()) == {f"{number}-{entry}" for number in range(4) for entry in range(20)}
    assert sorted(path.name for path in tmp_path.iterdir()) == [f".{FILE}.lock", FILE]


def test_lanes_are_really_measured(tmp_path: Path) -> None:
    working = [lane for lane in (Lane.EAGER, Lane.INDUCTOR, Lane.MLIR) if lane_problems()[lane] is None]
    choice = best_lane("rotary", suite_of("rotary").cases[0].arguments, working, tmp_path)
    assert set(choice.seconds) == set(working) and all(value > 0 for value in choice.seconds.values())
    assert choice.seconds[choice.lane] * TIE <= min(choice.seconds.values())
    assert choice.lane in (Lane.INDUCTOR, Lane.MLIR) or working == [Lane.EAGER]  # eager takes six operations
