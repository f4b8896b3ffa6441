"""A repetition reports equal where a run is equal; of each thing that differs, which and how far."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.command_line import answer, refused
from tests.measure.runs import vouched
from tests.measure.small import asked
from workbench.errors import WorkbenchError
from workbench.measure.run import run
from workbench.reports.differences import leaf_differences, token_differences
from workbench.reports.latency_check import LatencyCheck, find_repetitions
from workbench.reports.reproduce import Reproduction, reproduce
from workbench.runs.record import Record

ASKED = """
question: What comes back?
model: {name: "shape:tiny", dtype: float32}
backend: eager
cache: {page_size: 8, pages: 14, prefix: radix}
schedule: {max_num_seqs: 3, max_num_batched_tokens: 24}
sampling: {temperature: 0, logprobs: 0}
workload: {kind: traffic, requests: 6, arrivals: {kind: poisson, rate: 3000},
           lengths: {kind: fixed, prompt: 20, output: 8}}
measure: {warmup: 0, ceilings: false}
"""


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    return run(asked(ASKED), tmp_path_factory.mktemp("runs"), "first", progress=False)


def changed(record: Record, to: Path, table: str, change) -> Record:
    """A copy in which `change` was done to the rows of a table, with a manifest that vouches for them."""
    shutil.copytree(record.path, to)
    old = record.read_table(f"{table}.parquet")
    rows = old.to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, schema=old.schema), to / f"{table}.parquet")
    return vouched(to)


def test_batches_of_wall_clock_arrivals_come_back(record: Record, tmp_path: Path) -> None:
    found = reproduce(record, tmp_path, progress=False, replay=True)
    assert found.identical and found.same_reasons and found.steps == record.steps.num_rows
    assert found.repeated.script().same_as(record.script())
    assert not (found.settings + found.versions + found.hardware + found.running)
    assert [(each.within_bound, each.num_tokens, each.greedy_shortfall) for each in found.logits] == 2 * [(True, 8, 0)]
    assert all(each.logprob_error is not None and each.divergence_gap is None for each in found.logits)
    assert {each.name for each in found.timings} == {"TPOT", "ITL"}, "a replay has no arrivals of its own"
    assert find_repetitions(found.repeated) == []


def test_the_command_line_says_the_same(record: Record, tmp_path: Path) -> None:
    found = answer("reproduce --replay --logits 1", record.path, "--out", tmp_path)
    assert found["identical"] and found["replayed"] == {"steps": record.steps.num_rows, "same_reasons": True}
    assert [each["within"] for each in found["logits"]] == [True] and found["settings"] == []
    assert all(set(each) >= {"was", "now", "low", "high", "spread_source", "inside"} for each in found["timings"])


def test_a_changed_setting_is_equal_within_rounding_or_not(record: Record, tmp_path: Path) -> None:
    """Another cut of the steps rounds otherwise; another model is another one. The status says which."""
    change = "schedule.max_num_batched_tokens=16"
    found = reproduce(record, tmp_path, progress=False, changes=(change,), logit_checks=6)
    assert found.equal_within_bound and found.changes == (change,)
    assert f"against    {change}: equal within the bound of rounding, 6 requests checked" in str(found)
    assert [each.path for each in found.settings] == ["schedule.max_num_batched_tokens"]
    shown = answer("reproduce --set model.seed=4", record.path, "--out", tmp_path, code=1)
    assert not shown["equal_within_bound"] and shown["changes"] == ["model.seed=4"]


def test_tokens_that_no_rounding_explains(record: Record, tmp_path: Path) -> None:
    """A token that is not the model's: the runs diverge there, and the logits say that it is no tie."""

    def change(rows: list[dict]) -> None:
        rows[3]["token_ids"][5] = (rows[3]["token_ids"][5] + 1) % 256

    found = reproduce(changed(record, tmp_path / "copy", "requests", change), tmp_path, progress=False)
    (parted,) = found.tokens
    assert (parted.request, parted.position) == ("request-3", 5) and parted.was != parted.now
    first = found.logits[0]
    assert first.request == "request-3" and first.num_tokens == 6 and first.error <= first.bound
    assert (first.explained_by_rounding, first.within_bound) == (False, False)
    assert "rounding does not explain it" in str(first)
    assert str(found).startswith("tokens differ in 1 of 6 requests\nrequest-3: token 5 was ")


def test_log_probabilities_of_another_model_are_found(record: Record, tmp_path: Path) -> None:
    def change(rows: list[dict]) -> None:
        rows[0]["logprob"] -= 0.001

    found = reproduce(changed(record, tmp_path / "copy", "tokens", change), tmp_path, progress=False, logit_checks=1)
    assert found.identical and found.logits[0].logprob_error == pytest.approx(0.001, rel=0.1)
    assert not found.logits[0].within_bound and "NOT within the bound" in str(found)


def test_settings_newer_than_the_record_and_another_machine_are_named(record: Record, tmp_path: Path) -> None:
    copy = shutil.copytree(record.path, tmp_path / "copy")
    text = (copy / "experiment.yaml").read_text()
    (copy / "experiment.yaml").write_text(text.replace("batch_invariant: false\n", ""))
    around = json.loads((copy / "environment.json").read_text())
    around["cpu"]["model"], around["packages"]["torch"], around["cpu"]["frequency_mhz"] = "i486", "0.1", 33.0
    (copy / "environment.json").write_text(json.dumps(around))
    found = reproduce(vouched(copy), tmp_path, progress=False, logit_checks=0)
    assert [str(each) for each in found.settings] == ["batch_invariant: None -> False"]
    assert [each.path for each in found.versions] == ["packages.torch"]
    assert [each.path for each in found.hardware] == ["cpu.model"], "a frequency drifts from second to second"
    assert found.logits == () and "settings   batch_invariant: None -> False" in str(found)


def test_an_impossible_replay_is_reported_with_its_step(record: Record, tmp_path: Path) -> None:
    copy = shutil.copytree(record.path, tmp_path / "copy")
    text = (copy / "experiment.yaml").read_text()
    (copy / "experiment.yaml").write_text(text.replace("pages: 14", "pages: 4"))
    vouched(copy)
    again = ("reproduce --replay --out", tmp_path / "again", copy)
    printed = refused(*again)
    assert "replay: step" in printed and "pages needed" in printed
    assert list((tmp_path / "again").iterdir()) == [], "nothing stays of it"
    (copy / "spans.parquet").unlink()
    vouched(copy)
    assert "its steps cannot be replayed" in refused(*again)


def test_a_simulated_run_is_not_replayed(tmp_path: Path) -> None:
    experiment = asked(ASKED, "executor={kind: simulated}", "cache={page_size: 8}")
    simulated = run(experiment, tmp_path, "simulated", progress=False)
    assert reproduce(simulated, tmp_path, progress=False).identical
    with pytest.raises(WorkbenchError, match="cannot be replayed"):
        reproduce(simulated, tmp_path, progress=False, replay=True)


def test_times_are_held_against_repetitions_where_there_are_any(record: Record, tmp_path: Path) -> None:
    first = vouched(shutil.copytree(record.path, tmp_path / "first-20261121-120000-aaaa"))
    for name, factor in (("first-20261121-120001-bbbb", 2.0), ("first-20261121-120002-cccc", 3.0)):
        copy = shutil.copytree(record.path, tmp_path / name)
        summary = json.loads((copy / "summary.json").read_text())
        summary["ttft_s"]["p50"] *= factor
        (copy / "summary.json").write_text(json.dumps(summary))
        vouched(copy)
    shutil.copytree(record.path, tmp_path / "first-20261121-120003-dddd")
    (tmp_path / "first-20261121-120003-dddd" / "summary.json").unlink()  # damaged: no evidence
    assert len(find_repetitions(first)) == 2
    found: Reproduction = reproduce(first, tmp_path / "out", progress=False, logit_checks=0)
    (ttft,) = (each for each in found.timings if each.name == "TTFT")
    was = record.summary["ttft_s"]["p50"]
    assert (ttft.low, ttft.high) == (was, 3 * was) and ttft.spread_source == "3 recorded repetitions"


def test_inside_and_outside() -> None:
    timing = LatencyCheck("ITL", 1.0, 2.5, 0.5, 2.0, "some")
    assert not timing.within_spread and "above the spread" in str(timing)
    assert LatencyCheck("ITL", 1.0, 0.4, 0.5, 2.0, "some").within_spread is False
    assert LatencyCheck("ITL", 1.0, 2.0, 0.5, 2.0, "some").within_spread


def test_what_differs_by_its_path_and_where_tokens_part() -> None:
    assert [str(each) for each in leaf_differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1}, "d": [3]})] == [
        "a.c: 2 -> None", "d: None -> [3]",
    ]  # fmt: skip
    rows = [{"request_id": "r", "sample": s, "token_ids": ids} for s, ids in enumerate([[1, 2], [3], [4]])]
    other = [{"request_id": "r", "sample": s, "token_ids": ids} for s, ids in enumerate([[1, 2], [3, 5]])]
    longer, missing = token_differences(rows, other)
    assert (longer.request, longer.position, longer.was, longer.now) == ("r#1", 1, None, 5)
    assert str(longer) == "r#1: 1 tokens, then 2, equal up to the shorter's end"
    assert str(missing) == "r#2: only in one of the runs"
