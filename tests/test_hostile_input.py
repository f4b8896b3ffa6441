"""Every place that reads YAML or JSON of a person or a folder: what is hostile is refused there, in one line."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.hostile_texts import HOSTILE_JSON, HOSTILE_YAML
from tests.helpers.refusals import refuses
from tests.runs.folders import environment, write
from workbench.claims.summary import read_summaries, records_file
from workbench.cli.quality import parse_variant
from workbench.economics.prices import load_prices
from workbench.errors import WorkbenchError
from workbench.experiment.experiment import Experiment
from workbench.model.formats.safetensors_files import read_header
from workbench.model.hf.fields import read_object
from workbench.offline.output_file import OutputFile
from workbench.prompt.templates import ChatTemplate
from workbench.prompt.tokenization.tokenizer import Tokenizer
from workbench.reports.sweep_report import read_sweep
from workbench.runs.compared_run import find_compared_runs
from workbench.runs.condition import MANIFEST, check_folder
from workbench.runs.record import Record
from workbench.runs.runs import open_runs
from workbench.serve.batches.lines import read_json_line
from workbench.simulate.trace_files import read_trace
from workbench.sweep.folder import SweepFolder, experiment_with_axes
from workbench.sweep.point import PointResult, SweepPoint
from workbench.sweep.settings import parse_executor
from workbench.widgets.model_graph.roofline import points_of


def raw(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")


def file(read: Callable[[Path], Any], name: str = "given.yaml") -> Callable[[Path, bytes], Any]:
    """`read` of a file, or of its folder, in which `name` has the text."""

    def reads(folder: Path, text: bytes) -> Any:
        (folder / name).write_bytes(text)
        return read(folder if name.endswith(("tokenizer_config.json", "sweep.yaml")) else folder / name)

    return reads


def said(read: Callable[[str], Any]) -> Callable[[Path, bytes], Any]:
    return lambda folder, text: read(text.decode("utf-8", "replace"))


def header(folder: Path, text: bytes) -> Any:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    return read_header(folder / "model.safetensors")


def answers(folder: Path, text: bytes) -> Any:
    (folder / "out.jsonl").write_bytes(b" ".join(text.splitlines()) + b"\n")
    with OutputFile.open(folder / "out.jsonl"):
        pass


def summaries(folder: Path, text: bytes) -> Any:
    records_file(folder / "a.yaml").parent.mkdir()
    records_file(folder / "a.yaml").write_bytes(text)
    return read_summaries(folder / "a.yaml")


def trace(folder: Path, text: bytes) -> Any:
    (folder / "trace").write_bytes(b'{"a": ' + text.replace(b"\n", b" ") + b"}")
    return list(read_trace(folder / "trace"))


def of_run(name: str, read: Callable[[Path], Any]) -> Callable[[Path, bytes], Any]:
    """A finished run in which one file has the text: its manifest says that this is what was written."""

    def reads(folder: Path, text: bytes) -> Any:
        path = write(folder / "run", "question: q\n", {"wall_s": 1.0}, environment())
        (path / name).write_bytes(text)
        if name != MANIFEST:
            files = {each.name: {"bytes": each.stat().st_size, "sha256": "0"}
                     for each in path.iterdir() if each.name != MANIFEST}  # fmt: skip
            (path / MANIFEST).write_text(json.dumps({"files": files}))
        return read(path)

    return reads


YAML: dict[str, Callable[[Path, bytes], Any]] = {
    "an experiment": file(Experiment.from_file),
    "a sweep's experiment": file(lambda path: experiment_with_axes(path)),
    "a price table": file(load_prices),
    "a sweep": file(SweepFolder.read, "sweep.yaml"),
    "a sweep to report": file(read_sweep, "sweep.yaml"),
    "--executor": said(parse_executor),
    "a variant": said(lambda text: parse_variant("a: cache=" + "'" + text.replace("'", '"').replace("\\", "") + "'")),
    "a run's experiment": of_run("experiment.yaml", lambda path: Record.open(path)._display_table()),
}
JSON: dict[str, Callable[[Path, bytes], Any]] = {
    "config.json": file(read_object),
    "weights": header,
    "a chat template": file(ChatTemplate.from_folder, "tokenizer_config.json"),
    "a tokenizer": file(Tokenizer.from_file),
    "a line of a batch": lambda folder, text: read_json_line(b" ".join(text.splitlines())),
    "answers of a batch": answers,
    "a trace": trace,
    "a claim's summaries": summaries,
    "a point": lambda folder, text: ((folder / "point.json").write_bytes(text), SweepPoint.read(folder)),
    "a roofline's record": file(points_of, "bench.json"),
    "a run's summary": of_run("summary.json", lambda path: Record.open(path).summary),
    "a run's environment": of_run("environment.json", lambda path: Record.open(path).environment),
    "a run's manifest": of_run(MANIFEST, Record.open),
    "a run to compare": of_run("summary.json", lambda path: find_compared_runs(str(path))),
}
TEXTS = {"yaml": [text for found in HOSTILE_YAML.values() for text in found if len(text) < 10**6],
         "json": [text for found in HOSTILE_JSON.values() for text in found if len(text) < 10**6]}  # fmt: skip
TWICE = (*HOSTILE_YAML["is given twice"], *HOSTILE_JSON["is given twice"])  # no run folder is written by hand
PLACES = [*(("yaml", name) for name in YAML), *(("json", name) for name in JSON)]
READ_ANYHOW = {"--executor", "a variant", "a run's experiment"}  # of some a text is made


@pytest.mark.parametrize(("kind", "name"), PLACES)
def test_what_is_hostile_is_refused(kind: str, name: str, tmp_path: Path) -> None:
    reads = {**YAML, **JSON}[name]
    for number, text in enumerate(TEXTS[kind]):
        folder = tmp_path / str(number)
        folder.mkdir()
        tracemalloc.start()
        try:
            reads(folder, raw(text))
        except WorkbenchError as error:
            assert len(str(error).splitlines()) == 1
        else:
            assert name in READ_ANYHOW, text[:60]
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < 200e6


@pytest.mark.parametrize("name", ["experiment.yaml", "environment.json", "summary.json"])
def test_a_listing_says_of_hostile_runs_that_they_are_damaged(name: str, tmp_path: Path) -> None:
    """And of all others what they are: DuckDB would give up the whole listing."""
    texts = [text for text in TEXTS["yaml" if name.endswith("yaml") else "json"] if text not in TWICE]
    for number, text in enumerate([*texts, '{"a": ' * 900 + "1" + "}" * 900]):
        path = write(tmp_path / f"run-{number}", "question: q\n", {"wall_s": 1.0}, environment())
        (path / name).write_bytes(raw(text))
        (tmp_path / f"record-{number}.json").write_bytes(b'{"environment": ' + raw(text) + b"}")
    write(tmp_path / "whole", "question: q\n", {"wall_s": 2.0}, environment())
    (tmp_path / "sweep" / "points" / "one").mkdir(parents=True)
    for each in ("point.json", "outcome.json"):
        (tmp_path / "sweep" / "points" / "one" / each).write_text("[" * 100_000)
    found = {row["run"]: row for row in open_runs(tmp_path).select(["run", "wall_s", "state"]).to_pylist()}
    assert (found["whole"]["wall_s"], found["whole"]["state"]) == (2.0, "complete")
    whole = [run for run, row in found.items() if row["state"] == "complete" and row["wall_s"] is not None]
    assert set(whole) - {"whole"} <= {run for run in found if run.startswith("run-") and name == "environment.json"}
    assert all(row["state"] for row in found.values())
    open_runs(tmp_path).column_names("variants")


def test_what_a_listing_skips_is_nothing_that_is_whole(tmp_path: Path) -> None:
    (tmp_path / "point.json").write_text("[" * 100_000)
    (tmp_path / "outcome.json").write_text("[" * 100_000)
    assert PointResult.read(tmp_path) is None
    refuses("is no point of a sweep", SweepPoint.read, tmp_path)
    (tmp_path / MANIFEST).write_text('{"files": ' * 90 + "1" + "}" * 90)
    assert check_folder(tmp_path).state == "damaged"


def test_a_price_table_with_a_key_twice_is_refused(tmp_path: Path) -> None:
    table = "name: mine\nsource: me\ndate: 2026-01-01\ninput: 3\noutput: 15\ninput: 4\n"
    (tmp_path / "mine.yaml").write_text(table)
    refuses(
        r"mine.yaml: cannot be read \(input is given twice, in lines 4 and 6;",
        lambda: load_prices(tmp_path / "mine.yaml"),
    )
