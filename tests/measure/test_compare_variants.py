"""Variants of one workload beside each other: requests with a shared prefix, and requests as they are."""

from __future__ import annotations

from pathlib import Path

from tests.measure.small import PREFIX, TINY, asked, is_drawn
from workbench.measure.compare_variants import run_comparison
from workbench.measure.serving import measure_serving
from workbench.measure.shared_prefix import measure_shared_prefix
from workbench.reports.variants_table import variant_tables
from workbench.runs.record import Record


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


def test_every_round_has_a_prefix_of_its_own() -> None:
    found = measure_shared_prefix(asked(PREFIX, "judge=null"))
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
    found = measure_serving(asked(TINY, *changes), progress.append)
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
