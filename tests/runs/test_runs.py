"""A folder of runs as a database: what is listed is what lies there, broken or whole."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.measure.runs import small_recorder, write_run
from tests.runs.folders import RECORDS, environment, many, run_of_rounds, write
from tests.thorough import tries
from workbench.errors import WorkbenchError
from workbench.experiment import yaml as yaml_text
from workbench.files import read_yaml
from workbench.runs.folder import finite_json
from workbench.runs.locations import MAX_FOLDER_DEPTH, find_runs
from workbench.runs.rows import run_rows, yaml_to_json
from workbench.runs.runs import Runs, open_runs
from workbench.runs.sql import quote_columns

COUNT = 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    parent = tmp_path_factory.mktemp("runs")
    return parent, many(parent, COUNT)


@pytest.fixture(scope="module")
def runs(folder: tuple[Path, list[dict]]) -> Runs:
    return open_runs(folder[0])


@pytest.fixture
def rounds(tmp_path: Path) -> Path:
    return run_of_rounds(tmp_path, "turns", {"dense": [1.0, 1.1, 1.2], "int8": [2.0, 2.2, 2.4]})


def test_every_run_is_listed_with_its_own_settings_and_figures(folder: tuple[Path, list[dict]], runs: Runs) -> None:
    names = list(folder[1][0])
    assert runs.select(names).to_pylist() == folder[1]
    row = runs.select(["run", "date", "question", "model", "backend", "machine", "state"], limit=1).to_pylist()[0]
    assert str(row.pop("date")) == "2026-11-21 00:00:00"
    assert row == {"run": folder[1][0]["run"], "question": "How fast is it?", "model": "demo", "backend": "eager",
                   "machine": "AMD EPYC, 2 cores", "state": "complete"}  # fmt: skip


def test_where_order_and_limit_are_what_python_finds(folder: tuple[Path, list[dict]], runs: Runs) -> None:
    wanted = [row for row in folder[1] if row["cache.format"] == "int8" and row["output_tokens_per_s"] > 300]
    wanted.sort(key=lambda row: -row["output_tokens_per_s"])
    where = "cache.format = 'int8' AND output_tokens_per_s > 300"
    found = runs.select(["run"], where, "output_tokens_per_s desc", 7)
    assert found["run"].to_pylist() == [row["run"] for row in wanted][:7]
    [counted] = runs.query("SELECT count(*) AS n FROM runs WHERE cache.format = 'int8'").to_pylist()
    assert counted["n"] == sum(row["cache.format"] == "int8" for row in folder[1])


def test_a_measure_may_be_written_with_dots_as_the_summary_nests_it(runs: Runs) -> None:
    [row] = runs.query("SELECT ttft_s.p50 AS a, ttft_s_p50 AS b, phases.decode.tokens_per_s AS c FROM runs LIMIT 1"
                       ).to_pylist()  # fmt: skip
    assert row["a"] == row["b"] == pytest.approx(0.0067868) and row["c"] == pytest.approx(1141.6, abs=0.1)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("cache.fromat = 'int8'", "no column 'cache.fromat'; did you mean 'cache.format'"),
        ("format = 'int8'", "no column 'format'; did you mean 'cache.format'"),
        ("output_token_per_s > 3", "no column 'output_token_per_s'; did you mean 'output_tokens_per_s'"),
        ("qqqq = 1", "no column 'qqqq'; `workbench runs --names` lists all"),
        ("1=1) ; copy (select 1) to 'stolen.csv'; --", "--where: Parser Error"),
        ("1=1); drop view runs; select (1", "--where: Parser Error"),
        ("run IN (SELECT content FROM read_text('/etc/hostname'))", "Permission Error: Cannot access file"),
        ("run IN (SELECT column0 FROM read_csv('/etc/hostname'))", "Permission Error: "),
        ("run IN (SELECT file FROM glob('/etc/*'))", "Permission Error: "),
        ("run IN (SELECT a FROM secret)", "Table with name secret does not exist"),
        ("cache.pages = 12", "compare it with a text"),
    ],
)
def test_a_wrong_condition_is_one_clear_line(
    runs: Runs, where: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow as pa

    monkeypatch.chdir(tmp_path)
    secret = pa.table({"a": ["x"]})  # which DuckDB would find in this frame
    with pytest.raises(WorkbenchError) as caught:
        runs.select(["run"], where)
    assert message in str(caught.value) and "\n" not in str(caught.value) and secret.num_rows
    assert list(tmp_path.iterdir()) == [] and len(runs.select(["run"])) == COUNT


@pytest.mark.parametrize(
    "query",
    [
        "COPY (SELECT 1) TO 'stolen.csv'", "DROP VIEW runs", "SELECT 1; SELECT 2", "INSTALL httpfs", "ATTACH 'x.db'",
        "SET enable_external_access = true", "CREATE TABLE x AS SELECT 1", "SELECT * FROM 'x.parquet'", "SELEC 1", "",
        "SELECT * FROM read_parquet('x.parquet')", "PRAGMA database_list; SELECT 1", "EXPORT DATABASE 'x'",
    ],
)  # fmt: skip
def test_sql_reads_these_tables_and_nothing_else(
    runs: Runs, query: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WorkbenchError):
        runs.query(query)
    assert list(tmp_path.iterdir()) == []


def test_what_is_broken_is_a_row_that_says_so(tmp_path: Path) -> None:
    whole = "question: q\nworkload:\n  kind: random\n"
    for name in ("whole", "half", "cut", "no yaml", "no object", "bytes", "lists"):
        write(tmp_path / name, whole, {"wall_s": 1.5, "backend": {"name": "eager"}}, environment())
    (tmp_path / "half" / "manifest.json").unlink()
    (tmp_path / "cut" / "summary.json").write_text('{"wall_s": 1.')
    (tmp_path / "no yaml" / "experiment.yaml").write_text("question: [")
    (tmp_path / "no object" / "summary.json").write_text("[1, 2]")
    (tmp_path / "bytes" / "environment.json").write_bytes(b"\xff\xfe{")
    (tmp_path / "lists" / "summary.json").write_text('{"wall_s": [[1], {"a": 2}], "Wall_S": 3, "": 4, "x": {}}')
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / "INCOMPLETE").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("no run")
    (tmp_path / "other.json").write_text('{"no": "record"}')
    (tmp_path / "torn.json").write_text('{"environment": ')
    states = {row["run"]: row["state"] for row in open_runs(tmp_path).select(["run", "state"]).to_pylist()}
    assert states.keys() == {"whole", "half", "cut", "no yaml", "no object", "bytes", "lists", "killed", "torn.json"}
    assert states["whole"] == states["lists"] == "complete"
    expected = {"half": "manifest.json is missing", "cut": "damaged: summary", "no yaml": "damaged: experiment.yaml",
            "no object": "damaged: summary", "bytes": "damaged: environment", "killed": "unfinished",
            "torn.json": "damaged: "}  # fmt: skip
    for name, words in expected.items():
        assert words in states[name]
    found = {row["run"]: row["backend"] for row in open_runs(tmp_path).select(["run", "backend"]).to_pylist()}
    assert found["half"] == found["whole"] == "eager" and found["cut"] is None  # what is there is reported
    assert len(open_runs(tmp_path).select(table="variants")) == len(states)


leaves = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=4)
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)  # fmt: skip
odd = st.dictionaries(st.text(max_size=4), values, max_size=4)


@settings(max_examples=tries(15), deadline=None)
@given(summaries=st.lists(odd, min_size=1, max_size=3), experiments=st.lists(odd, min_size=3, max_size=3))
def test_whatever_a_summary_holds_is_no_crash(
    tmp_path_factory: pytest.TempPathFactory, summaries: list[dict], experiments: list[dict]
) -> None:
    parent = tmp_path_factory.mktemp("odd")
    for index, summary in enumerate(summaries):
        text = yaml_text.write_yaml(experiments[index])
        write(parent / str(index), "x", {}, environment())
        (parent / str(index) / "experiment.yaml").write_text(text, encoding="utf-8", errors="backslashreplace")
        (parent / str(index) / "summary.json").write_text(json.dumps(summary))
    found = open_runs(parent)
    for table in ("runs", "variants"):
        assert found.select(["*"], table=table).num_rows >= len(summaries)


@settings(max_examples=tries(80), deadline=None)
@example(value={"A": "\n", "B": "x\n\n", "C": {"d": "\n\ny\n", "e": " z"}, "D": ""})
@given(value=st.dictionaries(st.from_regex(r"[A-Za-z_]\w{0,5}", fullmatch=True), values, min_size=1, max_size=5))
def test_settings_are_read_as_yaml_reads_them(value: dict) -> None:
    text = yaml_text.write_yaml({"first": 1, "group": value, **value})
    found = yaml_to_json(text, {})
    assert found is not None and json.loads(found) == json.loads(json.dumps(finite_json(read_yaml(text)), default=str))


def test_pieces_read_once_are_right_in_every_later_text() -> None:
    pieces: dict[str, str | None] = {}
    for index in range(30):
        value = {"a": {"b": {"c": index % 3, "d": "x"}, "e": [index % 5]}, "b": {"c": index % 3}, "f": f"{index}"}
        found = yaml_to_json(yaml_text.write_yaml(value), pieces)
        assert found is not None and json.loads(found) == value


@pytest.mark.parametrize(
    ("sql", "wanted"),
    [
        ("cache.format = 'cache.format'", "\"cache.format\" = 'cache.format'"),
        ('"cache.format" > ttft_s.p50', '"cache.format" > "ttft_s_p50"'),
        ("r.run = 1.5 -- cache.format\n", "r.run = 1.5 -- cache.format\n"),
        ("CACHE.Format /* cache.format */ = 'it''s cache.format'",
         "\"cache.format\" /* cache.format */ = 'it''s cache.format'"),
    ],
)  # fmt: skip
def test_only_names_of_columns_are_quoted(sql: str, wanted: str) -> None:
    assert quote_columns(sql, ["cache.format", "ttft_s_p50"]) == wanted


def test_variants_are_rows_with_their_own_settings(rounds: Path) -> None:
    found = open_runs(rounds.parent).select(["variant", "cache.format", "ttft_s_p50"], table="variants").to_pylist()
    assert found == [
        {"variant": "dense", "cache.format": "dense", "ttft_s_p50": 1.1},
        {"variant": "int8", "cache.format": "int8", "ttft_s_p50": 2.2},
    ]
    [row] = open_runs(rounds).select(["run", "others_cpu_share"]).to_pylist()  # the run folder itself
    assert row == {"run": rounds.name, "others_cpu_share": 0.0}


def test_tables_of_runs_are_reached_with_the_settings_of_their_run(tmp_path: Path) -> None:
    first, second = (write_run(tmp_path, small_recorder(count)) for count in (3, 2))
    (tmp_path / "sweep" / "points" / "key").mkdir(parents=True)
    os.rename(second, tmp_path / "sweep" / "points" / "key" / "run")
    runs = open_runs(tmp_path)
    assert {"requests", "steps", "tokens", "decisions"} <= {*runs.tables} and runs.tables[2:] == sorted(runs.tables[2:])
    found = runs.query("SELECT run, count(*) AS n, max(index) AS last FROM tokens GROUP BY run ORDER BY n").to_pylist()
    assert found == [{"run": "sweep/points/key/run", "n": 2, "last": 1}, {"run": first.name, "n": 3, "last": 2}]
    assert runs.select(table="tokens").column_names[:3] == ["run", "request_id", "sample"]
    assert runs.select(["token_id", "wall_s"], "wall_s > 8", table="tokens").num_rows == 5
    (first / "tokens.parquet").write_bytes(b"torn")
    again = open_runs(tmp_path)
    assert again.select(table="tokens").num_rows == 2 and first.name in again.problems[0]


def test_a_point_of_a_sweep_that_failed_is_a_row_with_its_error(tmp_path: Path) -> None:
    experiment = {"question": "q", "cache": {"format": "int4"}}
    for key, run, error in (("done", "run-1", None), ("failed", None, "no such model"), ("torn", None, "x")):
        point = tmp_path / "sweep" / "points" / key
        point.mkdir(parents=True)
        (point / "point.json").write_text(json.dumps({"key": key, "label": key, "experiment": experiment}))
        outcome = json.dumps({"key": key, "run": run, "error": error, "seconds": 1.0, "peak_bytes": None})
        (point / "outcome.json").write_text(outcome if key != "torn" else outcome[:9])
    write(tmp_path / "sweep" / "points" / "done" / "run-1", "question: q\n", {"wall_s": 1.0}, environment())
    found = {row["run"]: row for row in open_runs(tmp_path).select(["run", "state", "cache.format"]).to_pylist()}
    assert found.keys() == {f"sweep/points/{name}" for name in ("done/run-1", "failed", "torn/outcome.json")}
    assert found["sweep/points/failed"]["state"] == "failed: no such model"
    assert found["sweep/points/failed"]["cache.format"] == "int4"
    assert found["sweep/points/torn/outcome.json"]["state"].startswith("damaged")


def test_committed_records_are_runs_too() -> None:
    runs = open_runs(RECORDS)
    files = sorted(path.name for path in RECORDS.glob("*.json"))
    assert runs.select(["run"])["run"].to_pylist() == files
    assert set(runs.select(["state"])["state"].to_pylist()) == {"complete"}
    assert runs.select(["run"], "question IS NULL OR date IS NULL").num_rows == 0
    [row] = runs.select(["model", "variant", "bits_per_byte", "cache.evict.budget"],
                        "run LIKE 'kv_evict%' AND variant = 'SnapKV 64'", table="variants").to_pylist()  # fmt: skip
    assert (row["model"], row["cache.evict.budget"]) == ("demo", 64) and row["bits_per_byte"] > 0


def test_nothing_but_the_runs_is_kept(folder: tuple[Path, list[dict]], tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    many(tmp_path, 2)
    assert len(open_runs(tmp_path).select()) == 2 and before == []
    files = sorted(tmp_path.rglob("*"))
    write(tmp_path / "later", "question: q\n", {}, environment())
    assert len(open_runs(tmp_path).select()) == 3
    assert set(tmp_path.rglob("*")) - set(files) == {tmp_path / "later", *(tmp_path / "later").iterdir()}


def test_a_folder_without_runs_has_no_rows_and_an_absent_one_is_reported(tmp_path: Path) -> None:
    assert open_runs(tmp_path).select().num_rows == 0
    assert "0 runs" in repr(open_runs(tmp_path)) and "0 runs" in open_runs(tmp_path)._repr_html_()
    with pytest.raises(WorkbenchError, match="no such folder"):
        open_runs(tmp_path / "none")
    with pytest.raises(WorkbenchError, match="no table 'tokens'"):
        open_runs(tmp_path).select(table="tokens")


def test_a_link_to_itself_ends(tmp_path: Path) -> None:
    many(tmp_path / "a", 1)
    (tmp_path / "a" / "loop").symlink_to(tmp_path / "a", target_is_directory=True)
    assert len(run_rows(find_runs(tmp_path))) >= 1


def test_runs_are_found_so_many_folders_down_and_none_that_is_hidden(tmp_path: Path) -> None:
    for levels in (1, MAX_FOLDER_DEPTH, MAX_FOLDER_DEPTH + 1):
        write(tmp_path.joinpath(str(levels), *"x" * (levels - 1)), "question: q\n", {}, {})
    write(tmp_path / ".hidden" / "run", "question: q\n", {}, {})
    (tmp_path / ".hidden.json").write_text("{}")
    assert [each.name.partition("/")[0] for each in find_runs(tmp_path)] == ["1", str(MAX_FOLDER_DEPTH)]
