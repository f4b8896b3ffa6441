"""A long prompt that arrives while others decode: what is asked when, and what is made of the times."""

from __future__ import annotations

from pathlib import Path

import pytest

from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.experiment.build import runner_for
from workbench.experiment.experiment import Experiment
from workbench.experiment.settings import PrefillInterferenceWorkload
from workbench.measure.compare_variants import run_comparison
from workbench.measure.prefill_interference import BEHIND, LONG, run_interference_round
from workbench.reports.variants_table import variant_tables
from workbench.trace.recorder import Recorder

WORK = {
    "kind": "prefill_interference", "running": 3, "prompt_tokens": 5, "output_tokens": 40, "after": 4,
    "long_tokens": 200, "rounds": 2,
}  # fmt: skip
EXPERIMENT = {
    "question": "stalled?", "model": {"name": "shape:tiny", "dtype": "float32"}, "backend": "eager", "workload": WORK,
    "cache": {"page_size": 8}, "schedule": {"max_num_seqs": 8, "max_num_batched_tokens": 256},
    "variants": {
        "a short one arrives": {"workload.long_tokens": 5}, "whole": {"schedule.chunked_prefill": False},
        "chunks of 256": {"schedule.chunk_tokens": 32}, "chunks of 128": {"schedule.chunk_tokens": 16},
    },
}  # fmt: skip


def recorded(variant: str) -> tuple[Recorder, dict]:
    runner: Runner = runner_for(Experiment.from_values(EXPERIMENT).variant(variant))
    recorder = Recorder()
    runner.telemetry.listener = recorder.record
    return recorder, run_interference_round(runner, PrefillInterferenceWorkload.model_validate(WORK), 1)


@pytest.mark.parametrize(("variant", "most"), [("whole", 205), ("chunks of 256", 32), ("chunks of 128", 16)])
def test_a_prompt_comes_whole_or_in_chunks_among_decodes(variant: str, most: int) -> None:
    recorder, found = recorded(variant)
    steps, asked = recorder.steps(), {row["request_id"]: row for row in recorder.requests()}
    assert list(asked) == ["0", "1", "2", LONG, BEHIND]
    mixed = [step for step in steps if step["phase"] == "mixed" and step["decode_tokens"] >= 3]
    assert max(step["prefill_tokens"] for step in mixed) == most
    assert len(mixed) == -(-205 // most)  # all of the prompt while those that run go on
    assert found["output_tokens"] == 3 * 40 + 1 + 40


def test_gaps_and_waits_are_those_of_the_record() -> None:
    recorder, found = recorded("whole")
    asked = {row["request_id"]: row for row in recorder.requests()}
    came = asked[LONG]["arrival"]
    gaps, before = [], []
    for name in ("0", "1", "2"):
        times = [row["time"] for row in recorder.tokens() if row["request_id"] == name]
        assert sum(time < came for time in times) >= 4
        for first, second in zip(times, times[1:], strict=False):
            (gaps if second > came else before).append(second - first)
    assert found["longest_gap_s"] == max(gaps)
    assert min(before) <= found["gap_s_p50"] <= max(before)
    for key, name in (("ttft_s", LONG), ("behind_ttft_s", BEHIND)):
        assert found[key] == pytest.approx(asked[name]["first_token"] - asked[name]["arrival"])
    assert len(found["running_ttft_s"]) == 3
    assert found["seconds"] >= found["ttft_s"]


def test_a_run_of_it_has_a_table_a_picture_and_verdicts(tmp_path: Path) -> None:
    values = EXPERIMENT | {"judge": {"path": "experiments.chunked_prefill:judge"}}
    record = run_comparison(Experiment.from_values(values), tmp_path, "stalls", progress=False)
    assert [each["claim"] for each in record.summary["verdicts"]] == ["chunked-prefill"]
    rounds = record.read_table("rounds.parquet").to_pylist()
    assert [row["variant"] for row in rounds] == list(EXPERIMENT["variants"]) * 2
    (costs,) = variant_tables(record.summary["rows"])
    assert "longest gap ms" in costs.headings
    picture = record.summary["picture"]
    assert "problem" in picture or (record.path / picture["svg"]).read_text().startswith("<svg")


def test_mistakes_are_reported() -> None:
    with pytest.raises(WorkbenchError, match=r"output_tokens \(4\) must be above after \(4\)"):
        Experiment.from_values({**EXPERIMENT, "workload": {**WORK, "output_tokens": 4}})
    crowded = Experiment.from_values({**EXPERIMENT, "variants": {}, "schedule": {"max_num_seqs": 2}})
    with pytest.raises(WorkbenchError, match="3 requests do not run at once"):
        run_interference_round(runner_for(crowded), PrefillInterferenceWorkload.model_validate(WORK), 1)
    long = PrefillInterferenceWorkload.model_validate({**WORK, "long_tokens": 500})
    with pytest.raises(WorkbenchError, match="long: .*256"):
        run_interference_round(runner_for(crowded.with_("schedule.max_num_seqs=8")), long, 1)
