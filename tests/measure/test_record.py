from __future__ import annotations

import json
import math
import os
import secrets
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.measure.runs import run_and_kill, small_recorder, write_run
from tests.thorough import tries
from tests.trace.histories import recorders
from workbench.errors import WorkbenchError
from workbench.runs.condition import MANIFEST, MARKER
from workbench.runs.folder import SCHEMAS, RunFolder
from workbench.runs.record import Record

FILES = {
    "experiment.yaml", "environment.json", "requests.parquet", "steps.parquet", "tokens.parquet",
    "verifications.parquet", "decisions.parquet", "summary.json", "trace.json", "manifest.json",
}  # fmt: skip
slow = settings(
    max_examples=tries(15),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@slow
@given(recorder=recorders())
def test_what_is_read_is_what_was_written(tmp_path, recorder):
    record = Record.open(write_run(tmp_path, recorder))
    record.verify()
    assert record.complete
    assert record.requests.to_pylist() == recorder.requests()
    assert record.steps.to_pylist() == recorder.steps()
    assert record.tokens.to_pylist() == recorder.tokens()
    assert record.decisions.to_pylist() == recorder.decisions()
    assert record.experiment_text == "question: how fast?\n"
    assert record.environment == {"python": "3.11"}
    assert record.summary["wall_s"] == 8.1
    assert {p.name for p in record.path.iterdir()} == FILES


def test_empty_tables_have_their_columns(tmp_path):
    run = RunFolder.create(tmp_path, "empty")
    for name in SCHEMAS:
        run.write_table(name, [])
    run.write_text("experiment.yaml", "question: how fast?\n")
    for name in ("environment.json", "summary.json"):
        run.write_json(name, {})
    record = Record.open(run.finish())
    for name, schema in SCHEMAS.items():
        table = record.read_table(name)
        assert table.num_rows == 0
        assert table.schema.equals(schema)


def test_every_column_a_recorder_tells_has_a_type():
    recorder = small_recorder()
    tables = {"requests": recorder.requests(), "steps": recorder.steps(), "tokens": recorder.tokens()}
    for name, rows in tables.items():
        assert list(rows[0]) == SCHEMAS[f"{name}.parquet"].names


def test_a_column_beyond_the_schema_is_kept(tmp_path):
    run = RunFolder.create(tmp_path, "more")
    run.write_table("tokens.parquet", [{"token_id": 1, "entropy": 0.5}, {"token_id": 2, "note": "odd"}])
    run.write_table("own.parquet", [{"x": 1}], pa.schema([("x", pa.int16())]))
    record = Record.open(run.finish())
    names = SCHEMAS["tokens.parquet"].names
    assert record.tokens.column_names == [*names, "entropy", "note"]
    assert record.tokens["entropy"].to_pylist() == [0.5, None]
    assert record.read_table("own.parquet").schema.field("x").type == pa.int16()


leaves = st.none() | st.booleans() | st.floats() | st.text() | st.integers(-9, 9)
values = st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner))


@slow
@given(value=values)
def test_json_is_strict_whatever_is_in_it(tmp_path, value):
    run = RunFolder.create(tmp_path, "json")
    run.write_json("summary.json", value)
    text = (run.path / "summary.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == finite(value)


def finite(value):
    if isinstance(value, list):
        return [finite(inner) for inner in value]
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def test_a_lone_surrogate_loses_nothing_else(tmp_path):
    run = RunFolder.create(tmp_path, "odd")
    run.write_json("summary.json", {"text": "a\udc80b", "n": 1})
    run.write_table("requests.parquet", [{"request_id": "a", "output_text": "a\udc80b", "output_tokens": 3}])
    record = Record.open(run.finish())
    assert record.summary == {"text": "a\udc80b", "n": 1}
    [row] = record.requests.to_pylist()
    assert (row["output_text"], row["output_tokens"]) == ("a?b", 3)


def test_a_record_is_a_value_and_shows_itself(tmp_path):
    record = Record.open(write_run(tmp_path, small_recorder(), name="a&b"))
    with pytest.raises(FrozenInstanceError):
        record.complete = False  # pyright: ignore[reportAttributeAccessIssue]
    page = record._repr_html_()
    assert "a&amp;b-" in page
    assert "ttft_s p50" in page
    assert "complete" in page


def test_a_run_says_it_is_incomplete_from_its_first_moment_to_its_last(tmp_path):
    run = RunFolder.create(tmp_path, "early")
    assert [p.name for p in run.path.iterdir()] == [MARKER]
    run.write_json("summary.json", {})
    with pytest.raises(WorkbenchError, match="unfinished .* holds summary.json"):
        Record.open(run.path)
    half = Record.open(run.path, incomplete_ok=True)
    assert (half.complete, half.summary) == (False, {})
    with pytest.raises(WorkbenchError, match=r"cannot read tokens.parquet .* holds INCOMPLETE, summary.json"):
        _ = half.tokens
    run.finish()
    Record.open(run.path).verify()
    with pytest.raises(WorkbenchError, match="finished"):
        run.write_json("summary.json", {})


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"files": 3}', '{"files": {"../x": {}}}', '{"files": {"x": 1}}'])
def test_a_damaged_manifest_is_reported(tmp_path, text):
    path = write_run(tmp_path, small_recorder())
    (path / MANIFEST).write_text(text)
    with pytest.raises(WorkbenchError, match="manifest.json is damaged"):
        Record.open(path)
    (path / MANIFEST).unlink()
    with pytest.raises(WorkbenchError, match="manifest.json is missing"):
        Record.open(path)


def test_damaged_contents_are_reported_when_read(tmp_path):
    run = RunFolder.create(tmp_path, "bad")
    run.write_text("summary.json", "{")
    run.write_text("tokens.parquet", "no parquet")
    record = Record.open(run.finish())
    with pytest.raises(WorkbenchError, match="summary.json is damaged"):
        _ = record.summary
    with pytest.raises(WorkbenchError, match="tokens.parquet is damaged"):
        _ = record.tokens


def test_no_folder_is_shared_even_when_names_collide(tmp_path, monkeypatch):
    few = iter(range(10**6))
    original = secrets.token_hex
    monkeypatch.setattr(secrets, "token_hex", lambda n: f"{next(few) % 12:04x}" if n == 2 else original(n))
    monkeypatch.setattr("time.strftime", lambda pattern: "20250101-000000")
    with ThreadPoolExecutor(4) as pool:
        runs = list(pool.map(lambda _: RunFolder.create(tmp_path, "same"), range(12)))
    assert len({run.path for run in runs}) == 12
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"same-20250101-000000-{i:04x}" for i in range(12)]
    with pytest.raises(WorkbenchError, match="no name is free"):
        RunFolder.create(tmp_path, "same")


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "/a"])
def test_a_run_name_is_a_plain_name(tmp_path, name):
    with pytest.raises(WorkbenchError, match="run name"):
        RunFolder.create(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("parent", ["file", "file/below", "/proc/nowhere/runs"])
def test_an_output_folder_that_cannot_be_written_is_reported_with_the_remedy(tmp_path, parent):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(WorkbenchError, match=r"output folder .* cannot be written \(.*\); .* --out"):
        RunFolder.create(tmp_path / parent, "run")


def test_a_folder_without_permission_is_reported(tmp_path):
    tmp_path.chmod(0o500)
    try:
        if os.access(tmp_path, os.W_OK):
            pytest.skip("this user may write everywhere (root)")
        with pytest.raises(WorkbenchError, match="Permission denied.*--out"):
            RunFolder.create(tmp_path, "run")
    finally:
        tmp_path.chmod(0o700)


def test_a_write_that_fails_leaves_the_older_file_whole(tmp_path):
    run = RunFolder.create(tmp_path, "again")
    run.write_json("summary.json", {"n": 1})
    with pytest.raises(TypeError):
        run.write_json("summary.json", {"n": object()})
    with pytest.raises(WorkbenchError, match="column 'n'"):
        run.write_table("own.parquet", [{"n": 1}], pa.schema([("n", pa.list_(pa.int8()))]))
    assert sorted(p.name for p in run.path.iterdir()) == [MARKER, "summary.json"]
    assert Record.open(run.finish()).summary == {"n": 1}


def test_a_file_is_replaced_never_changed(tmp_path):
    run = RunFolder.create(tmp_path, "swap")
    run.write_text("summary.json", "before")
    with (run.path / "summary.json").open() as older:
        run.write_text("summary.json", "after!")
        assert older.read() == "before"
    assert (run.path / "summary.json").read_text() == "after!"


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_has_the_name_already_stays(tmp_path, monkeypatch, kind):
    original, names = secrets.token_hex, iter(["aaaa", "bbbb"])
    monkeypatch.setattr(secrets, "token_hex", lambda n: next(names) if n == 2 else original(n))
    monkeypatch.setattr("time.strftime", lambda pattern: "now")
    taken = tmp_path / "run-now-aaaa"
    taken.mkdir() if kind == "folder" else taken.write_text("mine")
    assert RunFolder.create(tmp_path, "run").path.name == "run-now-bbbb"
    assert list(taken.iterdir()) == [] if kind == "folder" else taken.read_text() == "mine"


def judged(folder: Path) -> list[str]:
    """Return the state of each run in `folder`: complete, incomplete or hidden. A damaged one fails here."""
    fates = []
    for path in folder.iterdir() if folder.exists() else ():
        if path.name.startswith(".incomplete-"):
            fates.append("hidden")
        else:
            try:
                Record.open(path)
            except WorkbenchError as error:
                assert (path / MARKER).exists() and "unfinished" in str(error)
                _read_all(Record.open(path, incomplete_ok=True))
                fates.append("incomplete")
            else:
                record = Record.open(path)
                record.verify()
                assert {p.name for p in path.iterdir()} == FILES
                fates.append("complete")
    return fates


def _read_all(record: Record) -> None:
    """Even of an unfinished run, each file that has its name is whole."""
    for file in record.path.glob("[!.]*.parquet"):
        record.read_table(file.name)
    for file in record.path.glob("[!.]*.json"):
        record.read_json(file.name)


def test_a_run_killed_before_any_file_operation_is_never_complete_and_damaged(tmp_path):
    count = int(run_and_kill("run", str(tmp_path)))
    assert count > 3 * len(FILES)  # each file is opened, renamed, and its folder looked at
    fates = [judged(tmp_path / str(number)) for number in range(count + 1)]
    assert all(len(fate) <= 1 for fate in fates)
    assert fates[-1] == ["complete"]
    assert {fate[0] for fate in fates if fate} == {"hidden", "incomplete", "complete"}
    assert fates[count // 2] == ["incomplete"]


def test_records_need_no_torch():
    code = "import sys; from workbench.runs import measures, record; measures.unit('kl'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
