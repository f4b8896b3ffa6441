"""Figures that a value, a table or a remark shows are those of its data, each under its own name and in its unit."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from workbench.agents.agent import Agent
from workbench.agents.limits import Limits
from workbench.agents.result import AgentResult, CallRecord, Round, TokenUsage
from workbench.cluster.accounts import FleetAccount, compare_variants
from workbench.cluster.cluster import Cluster
from workbench.experiment.experiment import workload_class
from workbench.experiment.workloads import WORKLOADS, built_in_measures
from workbench.prompt.conversation import Conversation
from workbench.reports.run_tables import latency_table, memory_table, run_remarks, speculation_table
from workbench.reports.variants_table import COSTS, CURVES, QUALITY, heading, variant_tables
from workbench.request import SamplingParameters
from workbench.runs.compared_run import find_compared_runs
from workbench.runs.measures import find_measure, format_measure
from workbench.runs.metrics import MEASURES
from workbench.trace.events import Finished


def test_a_round_of_an_agent_shows_its_own_usage() -> None:
    rounds = tuple(
        Round(TokenUsage(*range(first, first + 5), seconds=9.0), first / 1e3, "stop", f"text {first}", calls=calls)
        for first, calls in ((10, (CallRecord("look", {"at": 1}, "seen", 0.5),)), (20, ()))
    )
    result = AgentResult("so", Conversation(turns=["q"]), "error", rounds, TokenUsage(seconds=2.5), error="why")
    table = result._display_table()
    assert table.rows == [
        [0, 10, 11, 12, 13, 14, "10 ms", 'look({"at": 1}) → seen'], [1, 20, 21, 22, 23, 24, "20 ms", "text 20"],
    ]  # fmt: skip
    assert (table.title, table.note) == ("agent: error after 2 rounds and 2.50 s", "answer: so; why")


def test_an_agent_shows_its_settings() -> None:
    made: Any = SimpleNamespace(
        runner=SimpleNamespace(model=SimpleNamespace(spec=SimpleNamespace(name="demo"))), system="be brief",
        tools=(SimpleNamespace(name="look", description="Look.\nLong."),), tool_choice="look",
        parallel_tool_calls=False, limits=Limits(rounds=3), sampling=SamplingParameters(temperature=0.5),
    )  # fmt: skip
    shown: dict[Any, Any] = {name: value for name, value in Agent._display_table(made).rows}
    assert shown.pop("tool look") == "Look." and shown.pop("temperature") == 0.5
    limits = {f"limits.{name}": value for name, value in made.limits}
    settings = {"model": "demo", "system": "be brief", "tool_choice": "look", "parallel_tool_calls": False}
    assert shown == settings | limits and shown["limits.rounds"] == 3


def test_the_end_of_a_request_shows_each_count_by_its_name() -> None:
    counts = {"found in the cache": 4, "computed": 5, "written to the cache": 7, "swapped in from the CPU": 6}
    end = Finished(
        1.0, "a", reason="stop", token_ids=(1, 2), prompt_tokens=3, cached_tokens=4, computed_tokens=5,
        restored_tokens=6, written_tokens=7, ended_by="stop_token", stop_reason=2,
    )  # fmt: skip
    others = {"tokens": "2 after 3 of the prompt", "ended by": "stop_token, 2"}
    assert {name: value for name, value in end._display_table().rows} == counts | others


def test_replicas_and_variants_of_a_fleet_show_their_own_counts() -> None:
    views = {
        n: SimpleNamespace(number=n, variant="b" * n, is_leaving=bool(n), num_requests=5 + n, pages=[10 * n, 11 * n, 7])
        for n in (0, 1)
    }
    fleet: Any = SimpleNamespace(
        config=SimpleNamespace(model=SimpleNamespace(name="demo")), front=SimpleNamespace(replicas=views)
    )
    assert Cluster._display_table(fleet).rows == [[0, "first", "serves", 5, 0, 0, 7], [1, "b", "leaves", 6, 10, 11, 7]]
    account = FleetAccount("b", 9, 2, Counter(stop=3), 11, 12, 13, 14, 15, 16, 17)
    account.ttft.extend([0.001, 0.002, 0.009])
    account.tpot.extend([0.003, 0.004, 0.008])
    shown = {
        "samples": 7, "ended": "3 stop", "prompt tokens": 11, "output tokens": 12, "found in caches": 13,
        "computed": 14, "moves": 15, "lost": "16 attempts, 17 tokens",
        "TTFT, median": "2 ms", "TPOT, median": "4 ms",
    }  # fmt: skip
    assert dict(account.rows()) == shown
    both = compare_variants([replace(account, variant="", prompt_tokens=1), account])
    assert both.headings[1:] == ("first", "b") and [row[2] for row in both.rows] == [*shown.values()]
    assert both.rows[2] == ["prompt tokens", 1, 11]


def test_a_report_shows_the_numbers_of_its_summary() -> None:
    keys = ("ttft_s", "tpot_s", "itl_s", "e2el_s")
    summary: dict[str, Any] = {
        key: {"p50": n / 1e3, "p90": n / 1e2 + 1, "p99": n / 1e2 + 2} for n, key in enumerate(keys, 1)
    } | {
        "output_tokens_per_s": 71, "phases": {"decode": {"tokens_per_s": 72}, "prefill": {"tokens_per_s": 73}},
        "backend": {"name": "eager", "reason": "given"}, "compiles": 2, "ranks": {"tensor": 3, "transport": "shm"},
        "tokens": {"cut": 4, "cached": 5, "computed": 6, "restored": 7}, "shared_pages": 8,
        "telemetry_share_of_decode": 0.09, "compiling_steps": 10, "others_cpu_share": 0.91, "replayed_steps": 12,
        "requests": {"by_finish_reason": {"stop": 1, "error": 13, "refused": 14}},
    }  # fmt: skip
    said = [[*map(float, re.findall(r"\d+(?:\.\d+)?", each.text))] for each in run_remarks(summary)]
    assert said == [[2], [3], [4], [5, 8, 6], [7], [9], [10], [91], [12], [13, 14]]
    assert [each.is_warning for each in run_remarks(summary)] == [0, 0, 1, 0, 0, 0, 1, 1, 0, 1]
    table = latency_table(summary)
    assert [row[:4] for row in table.rows] == [
        (name, f"{n} ms", f"1.0{n} s", f"2.0{n} s") for n, name in enumerate(("TTFT", "TPOT", "ITL", "E2EL"), 1)
    ]
    assert re.findall(r"\d+", table.note) == ["71", "72", "73"]
    kv = {"bytes_per_token_formula": 3, "pages_used_peak": 5, "page_size": 7, "bytes_used_peak": 105}
    cells = [row[1:] for row in memory_table(kv | {"bytes_allocated": 12, "bytes_allocated_formula": 11}).rows]
    assert cells[1:] == [("105", "5 pages x 7 tokens x 3 = 105"), ("12", "11 (DIFFERENT)")] and cells[0][0] == "3"
    accepted = {
        "acceptance_histogram": [1, 2, 4], "acceptance_by_position": [0.86, 0.57], "draft_acceptance_rate": 0.71,
        "accepted_tokens": 10, "drafted_tokens": 14, "mean_acceptance_length": 2.43, "draft_share": 0.25,
        "verifications": 7,
    }  # fmt: skip
    drafts = speculation_table(accepted)
    assert [row[1:] for row in drafts.rows] == [("7", "1", "2", "4"), ("", "", "86%", "57%")]
    assert re.findall(r"[\d.]+", drafts.note) == ["0.71", "10", "14", "2.43", "25"]


@pytest.mark.parametrize("known", [QUALITY, COSTS, CURVES], ids=["quality", "costs", "curves"])
def test_each_column_of_variants_shows_its_own_figure_in_its_unit(known: Any) -> None:
    figures = {name: 101 + n for n, name in enumerate(known) if find_measure(name)}
    row = {"variant": "a", **figures, "curve": [{"path": "x", "value": 0, **figures}] if known is CURVES else ()}
    tables = variant_tables([row])
    shown = {name: str(text) for table in tables for name, text in zip(table.headings, table.rows[0], strict=True)}
    if known is CURVES:
        shown = {table.headings[0].removesuffix(", x"): str(table.rows[0][1]) for table in tables}
    wanted = {heading(name): format_measure(name, value) for name, value in figures.items()}
    assert len(wanted) == len(figures) and wanted.items() <= shown.items()


def test_every_figure_that_a_workload_recorded_has_a_measure() -> None:
    """Of committed records; those whose workload is random prompts are of scripts, which name figures of their own."""
    found = set[str]()
    for path in (Path(__file__).parents[2] / "experiments" / "records").glob("*.json"):
        for run in find_compared_runs(str(path)):
            if run.settings.get("workload.kind", "random") != "random":
                found |= run.figures.keys()
    assert len(found) > 200 and [name for name in found if find_measure(name) is None] == []
    assert find_measure("seconds_a_moon") is None


def test_measures_of_one_name_are_equal() -> None:
    declared = {*MEASURES, *built_in_measures()}
    assert len(declared) == len({measure.name for measure in declared})
    loaded = {measure for kind in WORKLOADS for measure in workload_class(kind).measures}
    assert loaded == {*built_in_measures()} and len(loaded) > 80
