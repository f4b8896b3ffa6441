"""A long prompt that arrives while others decode: what is asked when, and what is made of the times."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.measure.small import INTERFERENCE, asked, is_drawn
from workbench.experiment.build import runner_for
from workbench.measure.compare_variants import measure_variants, run_comparison
from workbench.measure.prefill_interference import (
    BEHIND,
    LONG,
    run_interference_round,
)
from workbench.reports.variants_table import variant_tables
from workbench.trace.recorder import Recorder


def recorded(variant: str) -> tuple[Recorder, dict]:
    made = asked(INTERFERENCE).variant(variant)
    runner = runner_for(made)
    recorder = Recorder()
    runner.telemetry.listener = recorder.record
    return recorder, run_interference_round(runner, asked(INTERFERENCE).workload, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(("variant", "most"), [("whole", 205), ("chunks of 256", 32), ("chunks of 128", 16)])
def test_a_prompt_comes_whole_or_in_chunks_among_decodes(variant: str, most: int) -> None:
    recorder, found = recorded(variant)
    steps = recorder.steps()
    assert [row["request_id"] for row in recorder.requests()] == ["0", "1", "2", LONG, BEHIND]
    mixed = [step for step in steps if step["phase"] == "mixed" and step["decode_tokens"] >= 3]
    assert max(step["prefill_tokens"] for step in mixed) == most
    assert len(mixed) == -(-205 // most)  # all of the prompt while those that run go on
    assert found["output_tokens"] == 3 * 40 + 1 + 40


def test_gaps_and_waits_are_those_of_the_record() -> None:
    recorder, found = recorded("whole")
    rows = {row["request_id"]: row for row in recorder.requests()}
    came = rows[LONG]["arrival"]
    gaps, before = [], []
    for name in ("0", "1", "2"):
        times = [row["time"] for row in recorder.tokens() if row["request_id"] == name]
        assert sum(time < came for time in times) >= 4
        for first, second in zip(times, times[1:], strict=False):
            (gaps if second > came else before).append(second - first)
    assert found["longest_gap_s"] == max(gaps)
    assert min(before) <= found["gap_s_p50"] <= max(before)
    for key, name in (("ttft_s", LONG), ("behind_ttft_s", BEHIND)):
        assert found[key] == pytest.approx(rows[name]["first_token"] - rows[name]["arrival"])
    assert len(found["running_ttft_s"]) == 3
    assert found["seconds"] >= found["ttft_s"]


def test_a_prompt_may_come_right_after_the_first_token() -> None:
    """There is no gap before it then."""
    few = "variants={whole: {}}", "workload.running=1", "workload.after=1", "workload.output_tokens=3"
    (row,) = (found := measure_variants(asked(INTERFERENCE, *few))).rows
    assert row["gap_s_p50"] is None and row["longest_gap_s"] > 0 and len(found.tables["rounds"]) == 2
    assert variant_tables(found.rows)


def test_a_run_of_it_has_a_table_a_picture_and_verdicts(tmp_path: Path) -> None:
    made = asked(INTERFERENCE, "judge={path: 'experiments.chunked_prefill:judge'}")
    record = run_comparison(made, tmp_path, "stalls", progress=False)
    assert [each["claim"] for each in record.summary["verdicts"]] == ["chunked-prefill"]
    rounds = record.read_table("rounds.parquet").to_pylist()
    assert [row["variant"] for row in rounds] == list(made.variants) * 2
    (costs,) = variant_tables(record.summary["rows"])
    assert "longest gap" in costs.headings
    assert is_drawn(record)
