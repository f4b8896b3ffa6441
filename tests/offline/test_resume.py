"""Whenever a batch stops, and however: run again, it ends in the same file, and nothing is computed twice."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.offline.batches import LINES, line, run, runner, whole, written
from tests.thorough import tries
from workbench.errors import WorkbenchError
from workbench.offline.output_file import OutputFile
from workbench.offline.run import BatchProgress, _BatchRun


class Stop(BaseException):
    """A BaseException: no handler catches it on the way."""


@settings(max_examples=tries(40), deadline=None)
@given(st.data(), st.integers(1, 9))
def test_killed_at_any_byte_it_goes_on(data: st.DataObject, ahead: int) -> None:
    at = data.draw(st.integers(0, len(whole())))
    with tempfile.TemporaryDirectory() as folder:
        source, out = written(LINES, Path(folder) / "in.jsonl"), Path(folder) / "out.jsonl"
        out.write_bytes(whole()[:at])
        tally = run(source, out, max_pending_lines=ahead)
        assert out.read_bytes() == whole()
        assert tally.already_written == whole()[:at].count(b"\n")
        assert tally.truncated_bytes == at - (whole()[:at].rfind(b"\n") + 1)
        assert (tally.lines, tally.answered, tally.failed) == (9, 6, 3)


@settings(max_examples=tries(15), deadline=None)
@given(st.lists(st.integers(1, 9), max_size=4), st.integers(1, 9))
def test_stopped_after_any_lines_it_goes_on(stops: list[int], ahead: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, out = written(LINES, Path(folder) / "in.jsonl"), Path(folder) / "out.jsonl"
        for most in stops:
            written_now = []

            def tell(tally: BatchProgress, seen: list = written_now, most: int = most) -> None:
                seen.append(tally.answered)
                if len(seen) == most:
                    raise Stop

            try:
                run(source, out, report=tell, max_pending_lines=ahead)
            except Stop:
                assert not runner().has_unfinished_requests  # what was under way is cancelled, and its pages are free
            assert whole().startswith(out.read_bytes())
        run(source, out, max_pending_lines=ahead)
        assert out.read_bytes() == whole()


@pytest.mark.parametrize("ahead", [1, 4])
def test_no_more_lines_are_in_progress_than_may_be(ahead: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, step = [], _BatchRun.step

    def counted(self: _BatchRun) -> None:
        seen.append(len(self.pending))
        step(self)

    monkeypatch.setattr(_BatchRun, "step", counted)
    run(written(LINES, tmp_path / "in.jsonl"), tmp_path / "out.jsonl", max_pending_lines=ahead)
    assert max(seen) == ahead


def test_what_is_answered_is_not_computed_again(tmp_path: Path) -> None:
    source, out = written(LINES, tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    run(source, out)
    assert run(source, out).completion_tokens == 0
    out.write_bytes(b"".join(whole().splitlines(keepends=True)[:-1]))
    assert run(source, out).completion_tokens == 5


def test_a_batch_that_has_grown_is_gone_on_with(tmp_path: Path) -> None:
    source, out = written(LINES[:4], tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    run(source, out)
    written(LINES, source)
    assert run(source, out).already_written == 4 and out.read_bytes() == whole()


def test_answers_of_something_else_are_refused(tmp_path: Path) -> None:
    source, out = written(LINES, tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    run(source, out)
    for change, words in (
        (lambda: written([*LINES[:2], line("new", prompt="a"), *LINES[3:]], source), "line 3: answers another batch"),
        (lambda: written(LINES[:5], source), "line 6: answers another batch"),
    ):
        change()
        with pytest.raises(WorkbenchError, match=words):
            run(source, out)
        assert out.read_bytes() == whole()
    written(LINES, source)
    with pytest.raises(WorkbenchError, match="line 1: .* under other settings"):
        run(source, out, settings="another model")
    out.write_bytes(whole()[: whole().index(b"\n") + 1] + b'{"hello": 1}\n')
    with pytest.raises(WorkbenchError, match="line 2: not an answer of a batch"):
        run(source, out)


def test_two_at_once_do_not_mix(tmp_path: Path) -> None:
    pytest.importorskip("fcntl", reason="this system has no flock")
    source, out = written(LINES, tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    with OutputFile.open(out), pytest.raises(WorkbenchError, match="another process writes it"):
        run(source, out)
    run(source, out)
    assert out.read_bytes() == whole()


def test_files_that_will_not_do(tmp_path: Path) -> None:
    source = written(LINES, tmp_path / "in.jsonl")
    for wrong_source, out, words in (
        (source, source, "must go to another file"),
        (tmp_path / "none.jsonl", tmp_path / "out.jsonl", "none.jsonl: cannot be read"),
        (source, tmp_path / "no" / "out.jsonl", "cannot be written"),
        (source, tmp_path, "cannot be written"),
    ):
        with pytest.raises(WorkbenchError, match=words):
            run(wrong_source, out)
    assert source.read_text().count("\n") == len(LINES)
    assert run(written(["", " "], tmp_path / "empty.jsonl"), tmp_path / "out.jsonl").lines == 0
