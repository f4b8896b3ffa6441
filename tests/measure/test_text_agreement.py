"""The texts of two settings compared: figures, intervals, and verdicts that follow their rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.errors import WorkbenchError
from workbench.experiment.agreement import AGREEMENT_FIGURES, JUDGE, judge
from workbench.experiment.experiment import Experiment
from workbench.measure.compare_variants import measure_variants
from workbench.measure.run import run
from workbench.measure.text_agreement import agreement

SMALL = {"kind": "text_agreement", "prompts": 2, "prompt_tokens": 16, "output_tokens": 6, "rounds": 2}


def pair(right: dict[str, Any], **more: Any) -> Experiment:
    return Experiment.from_values({
        "question": "?", "backend": "eager", "sampling": {"temperature": 0}, "workload": SMALL,
        "variants": {"left": {}, "right": right}, **more,
    })  # fmt: skip


@given(st.lists(st.none() | st.integers(0, 9), min_size=1))
def test_equal_texts_count_with_their_length(places: list[int | None]) -> None:
    found = agreement(places, 10)
    assert 0 <= found["same_texts_share"] <= 1 and 0 <= found["first_divergence"] <= 10
    assert (found["first_divergence"] == 10) == (found["same_texts_share"] == 1)


def test_a_verdict_follows_its_rule(tmp_path: Path) -> None:
    """Of one run both verdicts are reached, by two rules, and the record has that of the rule in its experiment."""
    file = tmp_path / "pair.yaml"
    rule = "same_texts_share >= 1 and tpot_ratio > 0"
    file.write_text(pair({"schedule.chunk_tokens": 8}, judge={"path": JUDGE, "arguments": {"rule": rule}}).to_yaml())
    record = run(file, tmp_path / "runs", progress=False)
    left, right = record.summary["rows"]
    assert left["same_texts_share"] == right["same_texts_share"] == 1 and right["first_divergence"] == 6
    assert left["tpot_ratio"] == 1 and right["tpot_ratio_low"] <= right["tpot_ratio"] <= right["tpot_ratio_high"]
    assert right["kv_bytes_ratio"] == 1 and right["confidence"] == 0.5
    (verdict,) = record.summary["verdicts"]
    assert verdict["outcome"] == "holds" and verdict["rule"] == rule and "interval of 50%" in verdict["reason"]
    outcomes = {each: judge(record.summary["rows"], each)[0].outcome for each in (
        "same_texts_share >= 1", "same_texts_share < 1", "same_texts_share >= 1 and kv_bytes_ratio < 1")}  # fmt: skip
    assert list(outcomes.values()) == ["holds", "refuted", "holds-with-limits"]
    assert len(record.read_table("agreement.parquet")) == 4
    with pytest.raises(WorkbenchError, match="there is no figure"):
        judge(record.summary["rows"], "speed >= 1")


def test_settings_that_change_the_texts_are_found() -> None:
    cache = {"prefix": {"kind": "radix"}, "page_size": 4}
    found = measure_variants(pair({"sampling.temperature": 3.0}, cache=cache))
    left, right = found.rows
    assert left["same_texts_share"] == 1 > right["same_texts_share"] and right["first_divergence"] < 6
    assert set(AGREEMENT_FIGURES) <= set(right)
    assert {row["round"] for row in found.tables["tokens"]} == {1, 2}
    assert not any(row["cached_tokens"] for row in found.tables["requests"]), "a round computes every prompt"
    places = [row["first_divergence"] for row in found.tables["agreement"] if row["variant"] == "right"]
    first = [row for row in found.tables["requests"] if row["round"] == 1]
    texts = {name: [row["token_ids"] for row in first if row["variant"] == name] for name in ("left", "right")}
    for at, one, other in zip(places, texts["left"], texts["right"], strict=True):
        assert at is not None and one[:at] == other[:at] and one[at] != other[at]


def test_without_repetition_an_interval_is_not_judged() -> None:
    row = {"variant": "right", "tpot_ratio": 1.0, "tpot_ratio_high": None}
    (verdict,) = judge([{"variant": "left"}, row], "tpot_ratio_high <= 1.1")
    assert verdict.outcome == "not-testable-here" and "tpot_ratio_high" in verdict.reason
