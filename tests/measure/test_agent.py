"""An agent as a workload: answers judged, rounds on the warm prefix, sums as in the trace, runs that repeat exactly."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Literal

import pytest

import workbench
from tests.agents.script import runner, script
from tests.measure.small import AGENT, asked
from workbench.measure import agent as measured
from workbench.measure.agent import AgentQuestion, holds, questions_of
from workbench.measure.compare_variants import measure_variants, run_comparison
from workbench.reports import differences
from workbench.reports.report import render_report
from workbench.reports.variants_table import variant_tables
from workbench.runs.record import Record

PAGE = 16
CALLS: Counter[str] = Counter()


def read_gauge(name: Literal["pressure", "level"]) -> str:
    """Read a gauge."""
    CALLS[name] += 1
    return f"{name} is at 7 bar, as it was at noon, and has not moved since the valve was opened"


def broken(name: str) -> str:
    """Never work."""
    raise ValueError("out of order")


def drawn(count: int) -> list[AgentQuestion]:
    return [AgentQuestion(question=f"Question {number}?", kind=f"kind {number % 2}") for number in range(count)]


def not_questions() -> list[str]:
    return ["What?"]


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    variants = "variants={plain: {}, thinking: {sampling.thinking.budget_tokens: 6}}"
    return run_comparison(asked(AGENT, variants), tmp_path_factory.mktemp("runs"), "agent", False)


def test_a_later_round_computes_only_what_is_new(record: Record) -> None:
    """To the page: what was there is the last prompt and its answer, whose last token was never fed."""
    rounds = record.read_table("agent_rounds.parquet").to_pylist()
    assert [row["agent_round"] for row in rounds] == [1, 2] * 2
    for first, second in zip(rounds[::2], rounds[1::2], strict=True):
        assert first["cached_tokens"] == 0
        there = first["prompt_tokens"] + first["output_tokens"] - 1
        assert there - second["cached_tokens"] < PAGE
        assert second["computed_tokens"] == second["prompt_tokens"] - second["cached_tokens"]
        assert second["prompt_tokens"] > there and second["computed_tokens"] < first["prompt_tokens"]
        assert all(row[key] > 0 for row in (first, second) for key in ("ttft_s", "cold_ttft_s"))


@pytest.mark.parametrize("budget", [None, 6])
def test_a_cold_start_is_that_of_the_same_requests(budget: int | None) -> None:
    """With a thinking budget, the template opens the thought."""
    thinking: dict[str, Any] = {} if budget is None else {"thinking": {"budget_tokens": budget}}
    call = '<|tool|>{"name": "read_gauge", "arguments": {"name": "level"}}'
    answers = [f"{'hm<|/think|>' if budget else ''}{each}" for each in (call, "It is high.")]
    made = workbench.agent(runner(), [read_gauge], **script(*answers), **thinking)
    result = made.run("q")
    again = list(measured.requests_of(made, result))
    assert len(again) == 2 and [len(each.prompt_ids) for each in again] == [
        each.usage.prompt_tokens for each in result.rounds
    ]


def test_sums_are_those_of_the_trace(record: Record) -> None:
    rounds, questions, requests = (
        record.read_table(f"{name}.parquet").to_pylist() for name in ("agent_rounds", "questions", "requests")
    )
    assert len(rounds) == len(requests)
    for mine, trace in zip(rounds, requests, strict=True):
        for key in ("variant", "question", "prompt_tokens", "cached_tokens", "output_tokens", "token_ids"):
            assert mine[key] == trace[key], key
        # the trace counts what the answer was computed from, too: all but its last token
        assert trace["computed_tokens"] == mine["computed_tokens"] + mine["output_tokens"] - 1
        assert mine["ttft_s"] == trace["first_token"] - trace["arrival"]
    for row in questions:
        of = [each for each in rounds if (each["variant"], each["question"]) == (row["variant"], row["question"])]
        assert all(sum(each[key] for each in of) == row[key] for key in measured.TOKENS)
        assert (row["rounds"], row["calls"], row["failed_calls"]) == (2, 1, 0)
    for row in record.summary["rows"]:
        mine = [each for each in questions if each["variant"] == row["variant"]]
        assert row["prompt_tokens_per_question"] == sum(each["prompt_tokens"] for each in mine) / len(mine)
        assert row["thinking_tokens_per_question"] <= 6 * 2
        assert row["right"] == sum(each["right"] for each in mine)
    tables = variant_tables(record.summary["rows"])
    assert {"right", "rounds", "computed", "from a cold start"} <= {name for each in tables for name in each.headings}
    assert "chart.svg" in render_report(record.path) or record.summary["picture"].get("svg") == "chart.svg"


def test_it_repeats_exactly_and_compares(tmp_path: Path) -> None:
    one = asked(AGENT, "workload.questions=[{question: And the level?}]", "workload.cold_start=false")
    record = run_comparison(one, tmp_path, "agent", False)
    found = workbench.reproduce(record, tmp_path, progress=False)
    assert found.identical and found.requests == 2
    other = run_comparison(one.with_("workload.limits.rounds=1"), tmp_path, "other", False)
    compared = workbench.compare([other], record, force=True)
    assert {"right", "output_tokens_per_question"} <= {each.measure for each in compared.rows}
    differing = differences.output_differences(record, other)
    assert [each.request for each in differing] == ["variant as given, round 1, question 0, agent_round 2"]


def test_questions_come_from_a_function_too() -> None:
    drawn_by = f"workload.questions={{path: '{__name__}:drawn', arguments: {{count: 3}}}}"
    found = asked(AGENT, drawn_by, "workload.cold_start=false", "workload.tools=[]", "workload.tool_choice=auto")
    assert len(questions_of(found.workload)) == 3  # type: ignore[arg-type]
    results = measure_variants(found)
    assert [row["kind"] for row in results.tables["questions"]] == ["kind 0", "kind 1", "kind 0"]
    assert set(results.rows[0]["right_by_kind"]) == {"kind 0", "kind 1"} and results.rows[0]["later_ttft_s"] is None
    assert all(row["cold_ttft_s"] is None for row in results.tables["agent_rounds"])


def test_a_tool_that_fails_is_a_result() -> None:
    own = f"workload.tools=['{__name__}:broken']"
    results = measure_variants(asked(AGENT, own, "workload.tool_choice=broken", "workload.cold_start=false"))
    assert {row["failed_calls"] for row in results.tables["questions"]} <= {1}
    assert "out of order" in results.tables["agent_rounds"][0]["calls"] or "cut before" in str(results.tables)


@pytest.mark.parametrize(
    "answer, text, held",
    [
        ("12 * 7 = 84.", "84", True), ("12 * 7 = 840.", "84", False), ("It is 184.", "84", False),
        ("It is 84.5.", "84", False), ("It is 84.", "84.5", False), ("= -84.", "84", False), ("= -84.", "-84", True),
        ("3 weeks = 1814400 seconds.", "1814400", True), ("json.dumps: Serialize obj.", "Serialize obj.", True),
        ("84", "84", True), ("2.84", "84", False),
    ],
)  # fmt: skip
def test_an_answer_holds_a_whole_number(answer: str, text: str, held: bool) -> None:
    assert holds(answer, text) is held
