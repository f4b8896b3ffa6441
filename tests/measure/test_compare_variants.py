"""Variants of one workload beside each other: requests with a shared prefix, and requests as they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.refusals import refuses
from tests.measure.small import PREFIX, TINY, asked, is_drawn, shown
from workbench.experiment.experiment import Experiment
from workbench.experiment.workloads import LOADED_MEASURES
from workbench.measure.compare_variants import measure_variants, run_comparison
from workbench.measure.run import run
from workbench.reports.report import render_report
from workbench.reports.run_report import changed_settings
from workbench.reports.variants_table import variant_tables
from workbench.runs.measures import direction
from workbench.runs.record import Record
from workbench.sweep.point_cost import point_cost


def test_a_prefix_is_found_again_and_changes_no_token(tmp_path: Path) -> None:
    record = run_comparison(asked(PREFIX), tmp_path, "prefix", progress=False)
    computed, reused = record.summary["rows"]
    assert (computed["cached_tokens"], reused["cached_tokens"]) == (0, 96)  # whole pages of 8
    assert computed["same_tokens"] and reused["same_tokens"]
    assert [each["claim"] for each in record.summary["verdicts"]] == ["prefix-cache-latency", "prefix-cache-throughput"]
    requests = record.read_table("requests.parquet").to_pylist()
    assert len(requests) == 2 * 2 * 3
    for each in requests:
        first = each["index"] == 0 or each["variant"] == "computed"
        assert each["cached_tokens"] == (0 if first else 96)
        assert each["cached_tokens"] + each["computed_tokens"] == 105 + 4 - 1


def test_a_workload_of_ones_own_is_one_file_outside_the_package(tmp_path: Path) -> None:
    """Measure the guide's: it is drawn, shown in its units and read back, and its settings are checked as all are."""
    guide = (Path(__file__).parents[2] / "docs/guide/workloads.md").read_text()
    (tmp_path / "again.py").write_text(guide.partition("```python\n")[2].partition("```")[0])
    own = f"workload={{kind: '{tmp_path}/again.py:Again', prompt: 'def fibonacci(n): return 1 + n'}}"
    judge = f"judge={{path: '{tmp_path}/again.py:judge', arguments: {{least: 8}}}}"
    experiment = asked(PREFIX, "model.name=demo-draft", judge, own)
    record = run(experiment, tmp_path, progress=False)
    assert [row["found_tokens"] for row in record.summary["rows"]] == [0, 8] and is_drawn(record)
    assert [(each["outcome"], each["reason"]) for each in record.summary["verdicts"]] == [
        ("holds", "8 tokens were found")
    ]
    assert ("workload.prompt", "def fibonacci(n): return 1 + n") in changed_settings(record.experiment_text)
    assert "found in the cache" in shown(record) and "8 tokens" in shown(record)
    assert Experiment.from_yaml(record.experiment_text) == experiment and point_cost(experiment) is None
    refuses("workload.promt: unknown key; did you mean 'prompt'", experiment.with_, "workload.promt=x")
    (tmp_path / "again.py").write_text(f"open({str(tmp_path / 'is read')!r}, 'w')")
    known = LOADED_MEASURES.copy()
    LOADED_MEASURES.clear()  # as in another process: a record brings its measures, and none of its code is run
    try:
        page = render_report(record.path)
        assert "found in the cache" in page
        assert direction("found_tokens") == "max" and shown(Record.open(record.path)).count("8 tokens")
    finally:
        LOADED_MEASURES[:] = known
    assert not (tmp_path / "is read").exists()


MINE = """
import typing; from workbench.parts import Measure, VariantResults, Workload

class Mine(Workload):
    measures: typing.ClassVar = {measures}
    is_predicted = True
    predict = lambda self, experiment, on_progress: {predict}
    measure = lambda self, experiment, on_progress, predicted: {measure}
    chart = lambda self, rows, title: {chart}

judge = lambda rows, least=1: {judge}
"""
ROWS = "VariantResults([{'variant': 'one'}], {})"


@pytest.mark.parametrize(
    ("method", "value", "words"),
    [
        ("measure", "3", "mine.py:Mine: measure must return VariantResults of rows with .*: .*no attribute 'rows'"),
        ("measure", "VariantResults([{'n': 1}], {})", "mine.py:Mine: measure must return .*: KeyError: 'variant'"),
        ("measure", "1 / 0", r"mine.py:Mine: must measure .*: ZeroDivisionError: .* \(.*mine.py, line 8\)$"),
        ("predict", "1 / 0", r"mine.py:Mine: must measure .*: ZeroDivisionError: .* \(.*mine.py, line 7\)$"),
        (
            "measures",
            "(Measure('varaint'),)",
            "no row has its measure 'varaint'; did you mean 'variant'.; the measured rows are in",
        ),
        ("chart", "0", "mine.py:Mine: chart must return a figure or None: .*'int'.*; the measured rows are in"),
        ("chart", "rows[0]['m']", r"mine.py:Mine: chart must .*: KeyError: 'm' \(.*mine.py, line 9\); the measured"),
        ("judge", "1 / 0", r"mine.py:judge: must .*: ZeroDivisionError: .*mine.py, line 11\); the measured rows"),
        ("judge", "None", "mine.py:judge: must return a list of Verdict: TypeError: [^(]*; the measured rows are in"),
    ],
)
def test_a_fault_of_ones_own_part_is_one_line_and_loses_no_row(
    method: str, value: str, words: str, tmp_path: Path
) -> None:
    bodies = {"measures": "()", "predict": "{}", "measure": ROWS, "chart": "None", "judge": "[]"} | {method: value}
    (tmp_path / "mine.py").write_text(MINE.format(**bodies))
    experiment = asked(
        PREFIX, f"workload={{kind: '{tmp_path}/mine.py:Mine'}}", f"judge={{path: '{tmp_path}/mine.py:judge'}}"
    )
    refuses(words, run, experiment, tmp_path / "runs", progress=False)
    kept = [json.loads((run / "summary.json").read_text())["rows"] for run in (tmp_path / "runs").glob("*/")]
    assert kept == ([] if method in ("predict", "measure") else [[{"variant": "one"}]])


@pytest.mark.parametrize(
    ("measures", "words"),
    [
        ("Measure('lost')", r"TypeError: Mine: measures must be a tuple of Measure values; .* \(.*mine.py, line 4\)"),
        ("(Measure('lost', better='more'),)", "measure 'lost': better must be 'min', 'max' or None, not 'more'"),
    ],
)
def test_a_wrong_declaration_of_measures_is_one_line(measures: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE.format(measures=measures, predict="{}", measure=ROWS, chart="0", judge="[]"))
    refuses(words, asked, PREFIX, f"workload={{kind: '{tmp_path}/mine.py:Mine'}}")


def test_a_wrong_argument_of_a_judge_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    bodies = {"measures": "()", "predict": "{}", "measure": "1 / 0", "chart": "None", "judge": "[]"}
    (tmp_path / "mine.py").write_text(MINE.format(**bodies))
    judge = f"judge={{path: '{tmp_path}/mine.py:judge', arguments: {{leest: 2}}}}"
    experiment = asked(PREFIX, f"workload={{kind: '{tmp_path}/mine.py:Mine'}}", judge)
    refuses("must take the rows and its arguments: TypeError: .*'leest'", run, experiment, tmp_path / "runs")


def test_every_round_has_a_prefix_of_its_own() -> None:
    found = measure_variants(asked(PREFIX, "judge=null"))
    firsts = [each for each in found.tables["requests"] if each["variant"] == "reused" and each["index"] == 0]
    assert [each["cached_tokens"] for each in firsts] == [0, 0]


def test_requests_as_they_are(tmp_path: Path) -> None:
    work = "workload={kind: random, requests: 3, prompt_tokens: 20, output_tokens: 5}"
    experiment = asked(TINY, work, "variants={together: {}, one by one: {schedule.max_num_seqs: 1}}")
    record: Record = run_comparison(experiment, tmp_path, "requests", progress=False)
    together, alone = record.summary["rows"]
    assert together["kv_bytes_peak"] == 3 * alone["kv_bytes_peak"] > 0
    assert all(each["output_tokens_per_s"] > 0 for each in (together, alone))
    tokens = record.read_table("tokens.parquet").to_pylist()
    assert len(tokens) == 2 * 3 * 5
    assert is_drawn(record)


def test_rounds_are_in_turn_and_find_nothing_of_one_another() -> None:
    progress: list[str] = []
    work = """workload={kind: traffic, lengths: {kind: exponential, prompt: 30, output: 6},
        arrivals: {kind: at_once}, requests: 9}"""
    variants = "variants={static: {schedule.kind: static}, continuous: {}, reused: {cache.prefix: radix}}"
    changes = work, variants, "sampling.temperature=0", "schedule.max_num_seqs=3", "measure={rounds: 2}"
    found = measure_variants(asked(TINY, *changes), progress.append)
    assert progress[6:] == [f"round {turn}: {name}" for turn in (1, 2) for name in ("static", "continuous", "reused")]
    static, continuous, _ = found.rows
    assert static["output_tokens"] == continuous["output_tokens"] > 9
    steps = [row["variant"] for row in found.tables["steps"]]
    assert steps.count("static") > steps.count("continuous")  # no request takes the place of one that has ended
    for table in ("requests", "steps", "tokens"):
        assert {row["round"] for row in found.tables[table]} == {1, 2}
    assert all(row["cached_tokens"] == 0 for row in found.tables["requests"])
    assert all(row["longest_gap_s_p99"] > 0 and row["service_s_p50"] <= row["e2el_s_p50"] for row in found.rows)
    assert len(variant_tables(found.rows)) == 1
