"""`workbench cost`: what it prints, and how it ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.command_line import answer, cli


def test_the_system_prompt() -> None:
    found = answer("cost")
    assert found["plans"][0]["total"] == 6.0 and found["most_saved"] == 0.9
    assert all(row["by_formula"] == pytest.approx(row["total"]) == 6 * (1 - row["share"]) for row in found["plans"])
    assert found["said"][0]["share"] == 0.98 and found["said"][0]["share_at_that"] < 0.9
    assert found["cheapest"] == {"renewed by hits": "5 minutes", "from the write on": "1 hour"}


def test_what_the_source_says_stands_beside_its_own_question_only() -> None:
    assert answer("cost --set requests=999")["said"] == []
    assert "said" not in answer("cost --set output=5")


def test_random_arrivals_are_near_their_formula() -> None:
    words = "cost --set arrivals=poisson --set requests=500 --set days=8 --set question=30 --set output=200"
    found = answer(words)
    assert found == answer(words) != answer(f"{words} --set seed=1")
    for row in found["plans"]:
        assert row["by_formula"] == pytest.approx(row["total"], rel=0.05) and row["requests"] == 4000
        assert sum(row["by_kind"].values()) == pytest.approx(row["total"])


def test_a_trace(tmp_path: Path) -> None:
    line = '{"timestamp": %d, "input_length": 1030, "output_length": 4, "hash_ids": [0, 1, 2]}'
    file = tmp_path / "mine.jsonl"
    file.write_text("\n".join(line % (second * 1000) for second in (0, 10, 400)))
    found = answer("cost --set", f"trace={file}")
    reads = {row["plan"]: row["requests_that_read"] for row in found["plans"]}
    assert reads["5 minutes, renewed by hits"] == 1 and reads["1 hour, renewed by hits"] == 2
    assert found["response_cache"]["hits"] == 2 and found["workload"]["requests"] == 3
    out = cli("cost --set trace=azure --set requests=20 --set prompt=600").out
    assert "20 requests of a trace, only the lengths of its prompts are known; before each 600" in out


def test_it_is_read_by_people() -> None:
    out = cli("cost").out
    for words in ("6.0000", "0.6069", "89.9%", "61.3%", "pays from request 2", "the source states: 6.00", "20,160"):
        assert words in out
    out = cli("cost article-e-4x").out
    assert "an example" in out and "minutes" not in out


def test_a_machine() -> None:
    machine = "cost --per-hour 3.6 --tokens-per-s 1000"
    assert answer(machine)["cost_per_million"] == pytest.approx(1.0)
    assert "1.0000 a million tokens; article-a asks 15" in cli(machine).out
