"""A disk that fills up at any byte: one clear error, nothing half written, and what was done before is kept.

The limit on a file's length (RLIMIT_FSIZE) needs no rights and is met by every way to write a file: the system takes
the bytes that fit, and then says no. `/dev/full` is a disk without any room.
"""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.engine.poison import MODEL
from tests.engine.tiny import finals, request, runner_of
from tests.helpers.processes import python
from tests.helpers.refusals import refuses
from tests.measure.runs import small_recorder
from tests.offline.batches import LINES, whole, written
from tests.offline.batches import run as run_lines
from tests.thorough import tries
from workbench.claims.summary import Summary, store_summaries
from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.kv_cache import offload as host
from workbench.runs import folder as run_folder
from workbench.runs.condition import MARKER, check_folder
from workbench.runs.folder import write_dated_record, writing
from workbench.runs.record import Record
from workbench.runs.runs import open_runs
from workbench.sweep.point import write_json
from workbench.trace.events import Finished

resource = pytest.importorskip("resource", reason="this system has no limit on a file's length")


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """No file grows beyond `size` bytes meanwhile."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@settings(max_examples=tries(30))
@given(st.data(), st.integers(1, 9))
def test_a_batch_is_gone_on_with_when_there_is_room_again(data: st.DataObject, ahead: int) -> None:
    size = data.draw(st.integers(0, len(whole())))
    with tempfile.TemporaryDirectory() as folder:
        source, out = written(LINES, Path(folder) / "in.jsonl"), Path(folder) / "out.jsonl"
        with room_for(size):
            if size == len(whole()):
                run_lines(source, out, max_pending_lines=ahead)
            else:
                refuses(
                    r"out.jsonl: cannot be written \(File too large\); make room",
                    run_lines,
                    source,
                    out,
                    max_pending_lines=ahead,
                )
        kept = out.read_bytes() if out.exists() else b""  # no room for a line: no file
        assert kept == b"".join(whole().splitlines(keepends=True)[: kept.count(b"\n")]), "whole lines, in their order"
        assert len(kept) == max(n for n in ends(whole()) if n <= size)
        tally = run_lines(source, out, max_pending_lines=ahead)
        assert out.read_bytes() == whole() and (tally.already_written, tally.truncated_bytes) == (kept.count(b"\n"), 0)


def ends(text: bytes) -> list[int]:
    return [0, *(index + 1 for index, byte in enumerate(text) if byte == ord("\n"))]


def test_a_device_is_no_file_of_answers(tmp_path: Path) -> None:
    """Read as one, it never ends."""
    refuses(
        "/dev/full: is not a regular file",
        lambda: run_lines(written(LINES, tmp_path / "in.jsonl"), Path("/dev/full")),
    )


def fill(parent: Path) -> Path:
    with writing(parent, "run") as folder:
        folder.write_text("experiment.yaml", "question: q\n" + "#" * 1500 + "\n")
        folder.write_table("tokens.parquet", small_recorder().tokens())
        folder.write_json("summary.json", {"wall_s": 1.0, "rows": ["x" * 100] * 80})
        return folder.finish()


@settings(max_examples=tries(40))
@given(st.integers(0, 12_000), st.booleans())
@example(1023, False)
@example(1024, True)
def test_a_run_that_a_full_disk_ended_says_so(size: int, at_all: bool) -> None:
    """Also where not even another marker can be written."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        parent, none = Path(name), run_folder.write_atomically

        def full(path: Path, *rest: Any) -> None:
            if at_all and path.name == MARKER and path.exists():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            none(path, *rest)

        patch.setattr(run_folder, "write_atomically", full)
        try:
            with room_for(size):
                made = fill(parent)
        except WorkbenchError as error:
            assert "cannot be written" in str(error) and "make room there" in str(error)
        else:
            Record.open(made).verify()
            assert size > 8000
            return
        left = [path for path in parent.iterdir()]
        assert len(left) == (size >= 1024), "a run that cannot even say that it began leaves nothing"
        for path in left:
            found = check_folder(path)
            assert found.state == "killed" and "cannot be written" in found.reason and "File too large" in str(found)
            assert [file.name for file in path.iterdir() if file.name.startswith(".")] == []
            [row] = open_runs(parent).select(["state"]).to_pylist()
            assert row["state"].startswith("unfinished: ") and "File too large" in row["state"]


def test_the_error_that_ended_a_run_is_reported_however_long_it_is(tmp_path: Path) -> None:
    for why in ("\n\0\ud800é" * 1000, "short", ""):
        with pytest.raises(RuntimeError), writing(tmp_path, "run") as folder:
            raise RuntimeError(why)
        assert (folder.path / MARKER).stat().st_size == 1024
        found = check_folder(folder.path)
        assert found.state == "killed" and found.reason.startswith("RuntimeError") and "\n" not in str(found)


WRITERS: dict[str, Callable[[Path], object]] = {
    "a point of a sweep": lambda path: write_json(path / "point.json", {"x": "y" * 3000}),
    "a summary": lambda path: store_summaries(path / "a.yaml", [Summary("run a", {"x": "y" * 3000})]),
    "a record": lambda path: write_dated_record({"date": "2026-11-22T12:00:00", "x": "y" * 3000}, path, "bench"),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_no_half_of_a_file_is_left(writer: str, tmp_path: Path) -> None:
    for size in (0, 1, 1000, 2999):
        with room_for(size), pytest.raises(WorkbenchError, match="File too large"):
            WRITERS[writer](tmp_path)
        assert not [file for file in tmp_path.rglob("*") if file.is_file()]
    WRITERS[writer](tmp_path)


def offloading(path: Path) -> Runner:
    return runner_of(MODEL, pages=9, offload={"kind": "file", "path": str(path), "bytes": 2**16})


@pytest.mark.parametrize("size", [0, 10, 4096, 5000])
def test_an_offload_file_that_has_no_room_is_reported_at_once(size: int, tmp_path: Path) -> None:
    with room_for(size), pytest.raises(WorkbenchError, match=r"pages cannot take \d+ bytes \(File too large\)"):
        offloading(tmp_path / "pages")
    assert not (tmp_path / "pages").exists()


def test_a_disk_that_fills_up_under_an_offload_file_fails_preempted_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without reserved space, writing to the mapped file would end the process."""
    monkeypatch.setattr(os, "posix_fallocate", lambda handle, start, size: os.truncate(handle, size))
    requests = [request(f"r{i}", 9, 14) for i in range(4)]
    roomy = finals(runner_of(MODEL, pages=60), requests)
    runner, system = offloading(tmp_path / "pages"), os.statvfs

    class Full:
        f_bavail, f_frsize = 0, 4096

    assert host.os is os
    monkeypatch.setattr(os, "statvfs", lambda path: Full if "pages" in str(path) else system(path))
    done = {event.request_id: event for event in runner.stream(requests) if isinstance(event, Finished)}
    failed = {name: end for name, end in done.items() if end.reason == "error"}
    assert failed and all("its disk is full; make room there" in str(end.error) for end in failed.values())
    others = {name: end.token_ids for name, end in done.items() if name not in failed}
    assert others and others == {name: roomy[name] for name in others} and runner.scheduler.pages_in_use == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("num_records", [1, 300])  # less and more than is buffered
def test_output_that_cannot_be_written_is_one_line(tmp_path: Path, num_records: int) -> None:
    for number in range(num_records):
        (tmp_path / f"{number}.json").write_text(json.dumps({"environment": {}, "summary": {}, "question": "q"}))
    with open("/dev/full", "w") as full:
        done = python("-m", "workbench", "runs", tmp_path, stdout=full)
    message = "output: cannot be written (No space left on device); make room there, and run it again\n"
    assert done.returncode == 2 and done.stderr.endswith(message) and done.stderr.count("\n") == 1
