"""With an index of any age a listing says what it says without one."""

from __future__ import annotations

import itertools
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_kernels.result_cache import user_cache_directory
from tests.runs.folders import environment, many, write
from tests.thorough import tries
from workbench.files import cache_directory
from workbench.runs import index
from workbench.runs.condition import MARKER
from workbench.runs.runs import open_runs

TICK = 0.02  # seconds, longer than that of any file system's clock a test runs on
EXPERIMENT = "question: q\ncache:\n  format: int8\n"


def rewrite(file: Path) -> None:
    """Another digit in the last place that has one: the length is the same, and so is the inode."""
    text = file.read_text()
    places = [place for place, character in enumerate(text) if character in "123456789"]
    if not places:  # it was torn
        return
    with file.open("r+") as open_file:
        open_file.seek(places[-1])
        open_file.write(str(int(text[places[-1]]) % 9 + 1))


def of_run(change: Callable[[Path], object]) -> Callable[[Path, int], None]:
    def changed(folder: Path, which: int) -> None:
        runs = sorted(path for path in folder.iterdir() if path.is_dir())
        if runs:
            change(runs[which % len(runs)])

    return changed


def free(path: Path) -> Path:
    """The path itself, or the first of path-1, path-2, ... that nothing has."""
    names = (path.with_name(f"{path.name}-{n}") for n in itertools.count(1))
    return path if not path.exists() else next(name for name in names if not name.exists())


def has(name: str, change: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda run: change(run / name) if (run / name).exists() else None


def added(summary: dict) -> Callable[[Path, int], None]:
    return lambda folder, which: (
        write(free(folder / f"{'abmz'[which % 4]}-{which}"), EXPERIMENT, summary, environment(which)) and None
    )


CHANGES: dict[str, Callable[[Path, int], Any]] = {
    "a run": lambda folder, which: many(free(folder / "more"), 1 + which % 2, which),
    "a run with few keys": added({"wall_s": 1.5}),
    "a run with a key of its own": added({"mine": {"x": 1}}),
    "a run with a text for a number": added({"wall_s": "long"}),
    "one is gone": of_run(shutil.rmtree),
    "one has another name": of_run(lambda run: run.rename(free(run.with_name(run.name + "x")))),
    "one took another's name": of_run(
        lambda run: [run.rename(free(run.with_name("other"))), write(run, EXPERIMENT, {}, {})]
    ),
    "a figure is another": of_run(has("summary.json", rewrite)),
    "a setting is another": of_run(has("experiment.yaml", rewrite)),
    "a summary is torn": of_run(has("summary.json", lambda file: file.write_text(file.read_text()[:-9]))),
    "a summary is gone": of_run(lambda run: (run / "summary.json").unlink(missing_ok=True)),
    "it is unfinished": of_run(lambda run: (run / MARKER).write_text("")),
    "it is finished": of_run(lambda run: (run / MARKER).unlink(missing_ok=True)),
    "a record": lambda folder, which: (folder / f"kept-{which}.json").write_text(
        json.dumps({"environment": environment(which), "summary": {"wall_s": which}, "question": "q"})
    ),
    "no record": lambda folder, which: (folder / f"none-{which}.json").write_text('{"a": 1}'),
    "no index": lambda folder, which: [file.unlink() for file in stored()],
    "a torn index": lambda folder, which: [file.write_bytes(file.read_bytes()[: 99 * which]) for file in stored()],
}


def stored() -> list[Path]:
    return list((cache_directory() / "runs").glob("*.arrow"))


def listed(folder: Path) -> list[dict]:
    rows = open_runs(folder).select(["*"]).to_pylist()
    return [dict(sorted(row.items())) for row in rows]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(index, "MIN_INDEXED_RUNS", 1)
    monkeypatch.setattr(index, "STABLE_AFTER_NS", int(TICK * 1e9))


@settings(max_examples=tries(25), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(list(CHANGES)), st.integers(0, 5), st.booleans()), min_size=1, max_size=8))
def test_what_is_listed_is_what_lies_there(changes: list[tuple[str, int, bool]]) -> None:
    with TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        folder = Path(place)
        many(folder, 3)
        time.sleep(2 * TICK)
        listed(folder)
        for name, which, waits in changes:
            CHANGES[name](folder, which)
            if waits:
                time.sleep(2 * TICK)
            found = listed(folder)
            patch.setattr(index, "MIN_INDEXED_RUNS", 10**9)
            assert found == listed(folder)
            patch.setattr(index, "MIN_INDEXED_RUNS", 1)


def test_files_that_are_as_they_were_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many(tmp_path / "runs", 5)
    time.sleep(2 * TICK)
    first = listed(tmp_path / "runs")
    assert len(stored()) == 1
    monkeypatch.setattr("workbench.runs.locations.read_text", None)
    monkeypatch.setattr("workbench.runs.rows.read_text", None)
    assert listed(tmp_path / "runs") == first
    monkeypatch.undo()


def test_what_changed_just_now_is_not_entered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It could change again and have the same mark."""
    monkeypatch.setattr(index, "STABLE_AFTER_NS", 2_000_000_000)
    many(tmp_path / "runs", 5)
    listed(tmp_path / "runs")
    assert not stored()


def test_no_index_is_kept_of_few_runs_nor_where_none_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many(tmp_path / "runs", 5)
    time.sleep(2 * TICK)
    (tmp_path / "cache").write_text("a file, where a folder is wanted")
    first = listed(tmp_path / "runs")
    (tmp_path / "cache").unlink()
    monkeypatch.setattr(index, "MIN_INDEXED_RUNS", 6)
    assert listed(tmp_path / "runs") == first and not stored()


@pytest.mark.parametrize("name", ["listing.py", "files.py", "rows.py"])
def test_an_index_of_other_code_is_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code, read_bytes = index._code_fingerprint.__wrapped__, Path.read_bytes
    before = code()
    monkeypatch.setattr(Path, "read_bytes", lambda path: read_bytes(path) + b"#" * (path.name == name))
    assert code() != before


def test_both_packages_keep_things_in_one_directory() -> None:
    assert cache_directory() == user_cache_directory()


def test_indexes_of_the_folders_listed_last_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MAX_INDEX_FILES", 2)
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        many(folder, 1)
    time.sleep(2 * TICK)
    for folder in folders:
        listed(folder)
        time.sleep(TICK)
    assert [index.load_index(folder) is not None for folder in folders] == [False, True, True]
