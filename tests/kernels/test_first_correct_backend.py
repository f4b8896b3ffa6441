"""The first right backend: a wrong or failing one is passed over with its reason, and what was found is remembered."""

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

from compiled_kernels import correct_backend as right
from compiled_kernels import result_cache
from compiled_kernels.backends import Backend
from compiled_kernels.correct_backend import FILE, CorrectBackend, first_correct_backend
from compiled_kernels.result_cache import ResultCache
from tests.helpers.kernels import needs_mlir, on_threads
from tests.helpers.refusals import kernel_refuses

BACKENDS = (Backend.MLIR, Backend.INDUCTOR, Backend.EAGER)
ARGUMENTS = {"tokens": 1, "heads": 2, "dim": 4, "dtype": torch.float32}


def first(place: Path, backends: tuple[Backend, ...] = BACKENDS) -> CorrectBackend:
    return first_correct_backend("rotary", ARGUMENTS, backends, place)


class Verdicts:
    """Replace `disagreement`: `answers` has each backend's text to return or error to raise; `asked` lists the
    backends that were run."""

    def __init__(self) -> None:
        self.answers: dict[Backend, str | Exception] = {}
        self.asked: list[Backend] = []

    def __call__(self, suite: Any, case: Any, inputs: Any, backend: Backend) -> str | None:
        self.asked.append(backend)
        answer = self.answers.get(backend)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Verdicts]:
    found = Verdicts()
    monkeypatch.setattr(right, "disagreement", found)
    monkeypatch.setattr(right, "backend_problems", lambda: {**dict.fromkeys(Backend), Backend.TRITON: "no GPU"})
    yield found


def test_the_first_that_is_right_is_taken_and_remembered(verdicts: Verdicts, tmp_path: Path) -> None:
    verdicts.answers = {Backend.MLIR: "output 0: far away", Backend.INDUCTOR: RuntimeError("it\n broke")}
    found = first(tmp_path, (Backend.TRITON, *BACKENDS))
    assert found.backend is Backend.EAGER and verdicts.asked == list(BACKENDS)
    assert found.reason.startswith("on eager, checked on ")
    for words in ("mlir: output 0: far away", "inductor: RuntimeError: it broke", "triton: no GPU"):
        assert words in found.reason
    assert first(tmp_path, (Backend.TRITON, *BACKENDS)) == found and len(verdicts.asked) == 3


@pytest.mark.parametrize("error", [MemoryError("none left"), OSError(28, "No space left"), ImportError("gone")])
def test_what_passes_is_not_remembered(error: Exception, verdicts: Verdicts, tmp_path: Path) -> None:
    verdicts.answers = {Backend.MLIR: error}
    found = first(tmp_path)
    assert found.backend is Backend.INDUCTOR and type(error).__name__ in found.reason and not (tmp_path / FILE).exists()
    verdicts.answers = {}
    assert first(tmp_path).backend is Backend.MLIR


def test_other_work_or_another_machine_is_checked_anew(
    verdicts: Verdicts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(arguments: dict[str, Any], backends: tuple[Backend, ...]) -> int:
        first_correct_backend("rotary", arguments, backends, tmp_path)
        return len(verdicts.asked)

    assert [asked(ARGUMENTS, BACKENDS) for _ in range(2)] == [1, 1]
    assert asked({**ARGUMENTS, "tokens": 2}, BACKENDS) == 2
    assert asked({**ARGUMENTS, "dtype": torch.bfloat16}, BACKENDS) == 3
    assert asked(ARGUMENTS, BACKENDS[:2]) == 4
    with on_threads(torch.get_num_threads() + 1):
        assert asked(ARGUMENTS, BACKENDS) == 5
    monkeypatch.setattr(right, "machine_key", lambda: {"cpu": "another"})
    assert asked(ARGUMENTS, BACKENDS) == 6


def test_of_too_many_results_the_newest_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_cache, "MAX_ENTRIES", 3)
    kept = ResultCache(tmp_path / FILE)
    for number in (*range(5), 3):  # a result that is found anew stays where it was
        kept.add(str(number), {"found": number})
    assert kept.load() == {str(number): {"found": number} for number in (2, 3, 4)}


def test_where_none_is_right_that_is_an_error(verdicts: Verdicts, tmp_path: Path) -> None:
    verdicts.answers[Backend.MLIR] = "output 0: far away"
    kernel_refuses("rotary: no backend works for .*mlir: output 0: far away", lambda: first(tmp_path, BACKENDS[:1]))
    kernel_refuses(
        "unknown operator 'rotery'; did you mean 'rotary'",
        first_correct_backend,
        "rotery",
        ARGUMENTS,
        (Backend.MLIR,),
        tmp_path,
    )
    assert not (tmp_path / FILE).exists()


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"\xff\xfe", b"[]", b'{"entries": 5}', b'{"entries": {"a": {}}}', None, "backend", "refused"]
)
def test_a_damaged_file_is_made_anew(damage: Any, verdicts: Verdicts, tmp_path: Path) -> None:
    first(tmp_path)
    file = tmp_path / FILE
    if damage is None:
        file.unlink()
    elif isinstance(damage, str):
        kept = json.loads(file.read_text())["entries"]
        file.write_text(json.dumps({"entries": {key: {**entry, damage: 3} for key, entry in kept.items()}}))
    else:
        file.write_bytes(damage)
    for _ in range(2):
        assert first(tmp_path).backend is Backend.MLIR
        assert len(verdicts.asked) == 2


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), lambda of: st.lists(of) | st.dictionaries(
    st.sampled_from(["backend", "refused", "checked", "eager", "mlir"]), of)))  # fmt: skip
def test_no_entry_whatever_it_holds_is_a_backend_that_was_not_asked_for(entry: Any) -> None:
    found = right._sound(entry, BACKENDS)
    assert found is None or found.backend in BACKENDS


def test_where_nothing_can_be_written_it_still_finds_one(verdicts: Verdicts, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert first(tmp_path / "file").backend is Backend.MLIR


def test_writers_at_once_leave_a_whole_file(tmp_path: Path) -> None:
    kept = ResultCache(tmp_path / FILE)

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


@needs_mlir
def test_a_backend_is_really_run(tmp_path: Path) -> None:
    assert first(tmp_path).backend is Backend.MLIR
