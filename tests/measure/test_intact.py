"""A full disk, a kill, two writers at once, half a copy: recorded values stay, and missing ones are reported."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.refusals import refuses
from tests.measure.runs import run_and_kill, small_recorder, write_note, write_run
from tests.measure.small import PREFIX, asked
from tests.thorough import tries
from workbench.errors import WorkbenchError
from workbench.runs import process as alive
from workbench.runs.condition import MANIFEST, MARKER, check_folder, marker_text
from workbench.runs.folder import RunFolder, write_dated_record
from workbench.runs.record import Record

ROOT = Path(__file__).parents[2]
BYTES = 60_000  # more than one small run takes
MANIFEST_BYTES = 800  # which are the last


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below `folder`, hidden ones too."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


class Disk:
    """Room for so many bytes; the write that goes past the end writes what fits and fails."""

    def __init__(self, room: int) -> None:
        self.room = room

    @contextmanager
    def as_the_only_one(self) -> Iterator[None]:
        really = Path.open

        def opened(path: Path, mode: str = "r", *arguments, **named):
            raw = io.BufferedWriter(OnDisk(path, mode, self), 64) if "x" in mode or "w" in mode else None
            return raw or really(path, mode, *arguments, **named)

        with mock.patch.object(Path, "open", opened), mock.patch.object(os, "fsync"):
            yield


class OnDisk(io.FileIO):
    def __init__(self, path: Path, mode: str, disk: Disk) -> None:
        super().__init__(path, mode.replace("b", ""))
        self.disk = disk

    def write(self, given) -> int:
        fits = memoryview(given).cast("B")[: self.disk.room]
        if not fits and len(given):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.disk.room -= len(fits)
        return super().write(fits)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("small"), small_recorder())


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return contents(write_run(tmp_path_factory.mktemp("large"), small_recorder(40)))


@settings(max_examples=tries(40))
@given(short=st.integers(0, BYTES) | st.integers(1, MANIFEST_BYTES))
def test_a_disk_full_at_any_byte_loses_nothing_that_was_recorded(small: Path, large: dict, short: int) -> None:
    room = max(0, sum(map(len, large.values())) + len(marker_text()) - short)
    with tempfile.TemporaryDirectory() as folder:
        parent = Path(folder)
        older = shutil.copytree(small, parent / "older")
        try:
            with Disk(room).as_the_only_one():
                write_run(parent, small_recorder(40), "second")
            full = False
        except WorkbenchError as error:
            assert "No space left on device" in str(error)
            full = True
        assert contents(older) == contents(small)
        assert not [name for name in contents(parent) if ".tmp" in name]
        left = [path for path in parent.iterdir() if path != older]
        assert all(path.name.startswith("second-") for path in left)  # nothing hidden stays
        for path in left:
            record = Record.open(path, incomplete_ok=True)
            assert record.complete is not full
            assert all((path / name).read_bytes() == large[name] for name in record.condition.readable)
            if full:
                with pytest.raises(WorkbenchError, match="unfinished"):
                    Record.open(path)
        assert left or room < 1000


def test_the_simulated_disk_is_full_somewhere_and_large_enough_elsewhere(tmp_path: Path) -> None:
    with Disk(BYTES).as_the_only_one():
        write_run(tmp_path, small_recorder(40))
    for room in (0, 1000, 10_000):
        with Disk(room).as_the_only_one(), pytest.raises(WorkbenchError, match="No space left"):
            write_run(tmp_path, small_recorder(40))


def test_a_really_full_disk(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = (
        f"mount -t tmpfs -o size=512k tmpfs '{disk}' && '{sys.executable}' -m tests.measure.runs full '{disk}'"
        f" && cp -a '{disk}' '{tmp_path}/seen'"
    )
    done = subprocess.run(["unshare", "-rm", "sh", "-c", command], capture_output=True, text=True, cwd=ROOT)
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(f"no file system of one's own here: {done.stderr.strip()}")
    assert "cannot be written (No space left on device)" in done.stdout, done.stderr
    states = [check_folder(path, contents=True).state for path in (tmp_path / "seen").iterdir()]
    assert states.count("complete") >= 2 and states.count("complete") >= len(states) - 1
    assert set(states) <= {"complete", "killed", "unfinished"}
    assert not [name for name in contents(tmp_path / "seen") if ".tmp" in name]


SAID = {"absent": " is missing", "cut": " were written", "changed": " is not what was written"}
fates = st.sampled_from(["whole", "whole", "whole", *SAID])


@settings(max_examples=tries(60))
@given(data=st.data())
def test_a_half_copied_folder_is_whole_or_says_what_is_not(small: Path, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        copy, fate = Path(folder), {}
        for name, content in sorted(contents(small).items()):
            fate[name] = data.draw(fates, label=name)
            place = data.draw(st.integers(0, len(content) - 1), label="at") if fate[name] in ("cut", "changed") else 0
            if fate[name] != "absent":
                changed = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
                (copy / name).write_bytes({"whole": content, "cut": content[:place]}.get(fate[name], changed))
        wrong = {name for name, became in fate.items() if became != "whole"}
        found = check_folder(copy, contents=True)
        assert (found.state == "complete") is not bool(wrong)
        Record.open(copy, incomplete_ok=True)
        if wrong:
            with pytest.raises(WorkbenchError):
                Record.open(copy).verify()
        if MANIFEST not in wrong:
            assert {line.split()[0] for line in found.damaged} == wrong
            assert all(SAID[fate[line.split()[0]]] in line for line in found.damaged)
            assert {MANIFEST, *found.readable} == set(fate) - wrong
        elif fate[MANIFEST] == "absent":
            assert str(found).startswith("manifest.json is missing")


def test_an_older_record_without_a_manifest_opens_and_says_so(tmp_path: Path) -> None:
    path = write_run(tmp_path, small_recorder())
    (path / MANIFEST).unlink()
    record = Record.open(path, incomplete_ok=True)
    assert record.state == "no manifest" and not record.complete
    assert record.summary["wall_s"] == 8.1 and record.tokens.num_rows == 3
    refuses(r"manifest.json is missing.*; it holds .*steps.parquet", record.verify)


def test_running_and_killed_are_distinguished(tmp_path: Path) -> None:
    if alive.describe_process() is None:
        pytest.skip("this system does not tell when a process was started")
    assert check_folder(RunFolder.create(tmp_path, "mine").path).state == "running"
    code = f"from workbench.runs.folder import RunFolder; RunFolder.create({str(tmp_path)!r}, 'other'); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, cwd=ROOT)
    try:
        while not (found := list(tmp_path.glob("other-*"))):
            assert child.poll() is None
        assert check_folder(found[0]).state == "running"
    finally:
        child.kill()
        while (Path("/proc") / str(child.pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
            pass
        assert check_folder(found[0]).state == "killed"  # even before anything has checked it
        child.wait()
    assert check_folder(found[0]).state == "killed"
    refuses(r"unfinished \(it was killed or interrupted\) and holds nothing; run", Record.open, found[0])
    shutil.copytree(found[0], tmp_path / "elsewhere")
    written = (found[0] / MARKER).read_text().splitlines()
    there = json.loads(written[1]) | {"where": "another machine"}
    (tmp_path / "elsewhere" / MARKER).write_text(f"{written[0]}\n{json.dumps(there)}\n")
    assert check_folder(tmp_path / "elsewhere").state == "unfinished"


@settings(max_examples=tries(20))
@given(mark=st.none() | st.text() | st.fixed_dictionaries({"pid": st.integers() | st.text(), "where": st.text()}))
def test_any_mark_can_be_asked_for(mark: object) -> None:
    assert alive.is_running(mark) is None
    here = alive.describe_process()
    if here is not None and isinstance(mark, dict):
        assert alive.is_running(here | {"pid": mark["pid"]}) is (mark["pid"] == here["pid"])


def test_records_of_one_second_all_stay(tmp_path: Path) -> None:
    with ProcessPoolExecutor(4, mp_context=get_context("fork")) as pool:
        paths = list(pool.map(write_note, [tmp_path] * 16))
    names = ["note-20250102-030405", *(f"note-20250102-030405-{number}" for number in range(2, 17))]
    assert sorted(path.stem for path in paths) == sorted(names)
    assert {path.name: path.read_bytes() for path in paths} == contents(tmp_path)


def test_a_record_never_takes_a_name_even_where_files_have_but_one(tmp_path: Path) -> None:
    first = write_note(tmp_path)
    before = first.read_bytes()
    refused = OSError(errno.EPERM, "no hard links here")
    with mock.patch.object(os, "link", side_effect=refused):
        second = write_dated_record({"date": "2025-01-02T03:04:05"}, tmp_path, "note")
    assert first.read_bytes() == before and second != first
    assert json.loads(second.read_text()) == {"date": "2025-01-02T03:04:05"}


def test_a_record_killed_before_any_file_operation_is_whole_or_absent(tmp_path: Path) -> None:
    count = int(run_and_kill("note", str(tmp_path)))
    assert count >= 3
    expected = write_note(tmp_path).read_bytes()
    kept = [list((tmp_path / str(number)).glob("note-*.json")) for number in range(count + 1)]
    assert {path.read_bytes() for paths in kept for path in paths} == {expected}
    assert all((tmp_path / str(number) / "note-20250102-030405.json").exists() for number in range(count + 1))
    assert len(kept[0]) == 1 and len(kept[-1]) == 2


def test_a_judge_that_fails_loses_no_measurement(tmp_path: Path) -> None:
    from workbench.experiment.experiment import VariantResults
    from workbench.measure import compare_variants as comparison

    found = VariantResults([{"variant": "a", "seconds": 1.5}], {}, {"rounds": [{"round": 1}]})
    with (
        mock.patch.object(comparison, "measure_variants", return_value=found),
        mock.patch.object(comparison, "verdicts", side_effect=WorkbenchError("judge: a column is missing")),
        pytest.raises(WorkbenchError, match="a column is missing"),
    ):
        comparison.run_comparison(asked(PREFIX), tmp_path, "judged", progress=False)
    (path,) = tmp_path.iterdir()
    record = Record.open(path, incomplete_ok=True)
    assert not record.complete and record.summary["rows"] == found.rows
    assert record.read_table("rounds.parquet").num_rows == 1
