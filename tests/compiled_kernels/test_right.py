"""The first right lane: a wrong or failing one is passed over with its reason, and what was found is remembered."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiled_kernels import right
from compiled_kernels.lanes import Lane, LaneError, lane_problems
from compiled_kernels.remembered import Remembered
from compiled_kernels.right import FILE, right_lane

LANES = (Lane.MLIR, Lane.INDUCTOR, Lane.EAGER)
ARGUMENTS = {"tokens": 1, "heads": 2, "dim": 4, "dtype": torch.float32}


class Verdicts:
    """Stands in for `disagreement`: what each lane's is, or what it throws; `asked` are the lanes that were run."""

    def __init__(self) -> None:
        self.told: dict[Lane, str | Exception] = {}
        self.asked: list[Lane] = []

    def __call__(self, suite: Any, case: Any, inputs: Any, lane: Lane) -> str | None:
        self.asked.append(lane)
        told = self.told.get(lane)
        if isinstance(told, Exception):
            raise told
        return told


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Verdicts]:
    found = Verdicts()
    monkeypatch.setattr(right, "disagreement", found)
    monkeypatch.setattr(right, "lane_problems", lambda: {**dict.fromkeys(Lane), Lane.TRITON: "no GPU"})
    yield found


def test_the_first_that_is_right_is_taken_and_remembered(verdicts: Verdicts, tmp_path: Path) -> None:
    verdicts.told = {Lane.MLIR: "output 0: far away", Lane.INDUCTOR: RuntimeError("it\n broke")}
    found = right_lane("rotary", ARGUMENTS, (Lane.TRITON, *LANES), tmp_path)
    assert found.lane is Lane.EAGER and verdicts.asked == list(LANES)
    assert found.reason.startswith("on eager, checked on ")
    for words in ("mlir: output 0: far away", "inductor: RuntimeError: it broke", "triton: no GPU"):
        assert words in found.reason
    assert right_lane("rotary", ARGUMENTS, (Lane.TRITON, *LANES), tmp_path) == found and len(verdicts.asked) == 3


@pytest.mark.parametrize("error", [MemoryError("none left"), OSError(28, "No space left on device")])
def test_what_passes_is_not_remembered(error: Exception, verdicts: Verdicts, tmp_path: Path) -> None:
    verdicts.told = {Lane.MLIR: error}
    found = right_lane("rotary", ARGUMENTS, LANES, tmp_path)
    assert found.lane is Lane.INDUCTOR and type(error).__name__ in found.reason and not (tmp_path / FILE).exists()
    verdicts.told = {}
    assert right_lane("rotary", ARGUMENTS, LANES, tmp_path).lane is Lane.MLIR


def test_other_work_or_another_machine_is_checked_anew(
    verdicts: Verdicts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(arguments: dict[str, Any], lanes: tuple[Lane, ...]) -> int:
        right_lane("rotary", arguments, lanes, tmp_path)
        return len(verdicts.asked)

    assert [asked(ARGUMENTS, LANES) for _ in range(2)] == [1, 1]
    assert asked({**ARGUMENTS, "tokens": 2}, LANES) == 2
    assert asked({**ARGUMENTS, "dtype": torch.bfloat16}, LANES) == 3
    assert asked(ARGUMENTS, LANES[:2]) == 4
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert asked(ARGUMENTS, LANES) == 5
    finally:
        torch.set_num_threads(threads)
    monkeypatch.setattr(right, "machine", lambda: {"cpu": "another"})
    assert asked(ARGUMENTS, LANES) == 6


def test_where_none_is_right_that_is_an_error(verdicts: Verdicts, tmp_path: Path) -> None:
    verdicts.told[Lane.MLIR] = "output 0: far away"
    with pytest.raises(LaneError, match="rotary: no lane works for .*mlir: output 0: far away"):
        right_lane("rotary", ARGUMENTS, (Lane.MLIR,), tmp_path)
    with pytest.raises(LaneError, match="unknown operator 'rotery'; did you mean 'rotary'"):
        right_lane("rotery", ARGUMENTS, (Lane.MLIR,), tmp_path)
    assert not (tmp_path / FILE).exists()


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"\xff\xfe", b"[]", b'{"entries": 5}', b'{"entries": {"a": {}}}', None, "lane", "refused"]
)
def test_a_damaged_file_is_made_anew(damage: Any, verdicts: Verdicts, tmp_path: Path) -> None:
    right_lane("rotary", ARGUMENTS, LANES, tmp_path)
    file = tmp_path / FILE
    if damage is None:
        file.unlink()
    elif isinstance(damage, str):
        kept = json.loads(file.read_text())["entries"]
        file.write_text(json.dumps({"entries": {key: {**entry, damage: 3} for key, entry in kept.items()}}))
    else:
        file.write_bytes(damage)
    for _ in range(2):
        assert right_lane("rotary", ARGUMENTS, LANES, tmp_path).lane is Lane.MLIR
        assert len(verdicts.asked) == 2


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), lambda of: st.lists(of) | st.dictionaries(
    st.sampled_from(["lane", "refused", "checked", "eager", "mlir"]), of)))  # fmt: skip
def test_no_entry_whatever_it_holds_is_a_lane_that_was_not_asked_for(entry: Any) -> None:
    found = right._sound(entry, LANES)
    assert found is None or found.lane in LANES


def test_where_nothing_can_be_written_it_still_finds_one(verdicts: Verdicts, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert right_lane("rotary", ARGUMENTS, LANES, tmp_path / "file").lane is Lane.MLIR


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


def test_a_lane_is_really_run(tmp_path: Path) -> None:
    if problem := lane_problems()[Lane.MLIR]:
        pytest.skip(problem)
    assert right_lane("rotary", ARGUMENTS, (Lane.MLIR, Lane.EAGER), tmp_path).lane is Lane.MLIR
