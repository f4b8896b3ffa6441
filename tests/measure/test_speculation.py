"""Drafted tokens and their acceptance, as figures, tables, pictures and verdicts."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.refusals import refuses
from tests.measure.small import SPECULATION, TINY, asked, is_drawn, shown
from workbench.experiment.experiment import Experiment
from workbench.measure.compare_variants import measure_variants, run_comparison
from workbench.measure.run import run
from workbench.parts import NO_DRAFT, Proposer
from workbench.runs.metrics import acceptance_metrics, expected_tokens_per_verification

CHECKS = st.lists(
    st.integers(1, 5).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k))), min_size=1, max_size=30
)


@given(CHECKS)
def test_figures_of_acceptance_agree_with_one_another(pairs) -> None:
    found = acceptance_metrics([{"drafted": k, "accepted": a} for k, a in pairs], [])
    assert found["verifications"] == len(pairs) == sum(found["acceptance_histogram"])
    assert sum(n * count for n, count in enumerate(found["acceptance_histogram"])) == found["accepted_tokens"]
    assert 1 + sum(found["acceptance_by_position"]) == pytest.approx(found["mean_acceptance_length"])
    for place, share in enumerate(found["acceptance_by_position"], 1):  # a share of all checks, as vLLM counts it
        assert share * len(pairs) == pytest.approx(sum(found["acceptance_histogram"][place:]))
    assert found["draft_acceptance_rate"] * found["drafted_tokens"] == pytest.approx(found["accepted_tokens"])
    assert found["mean_acceptance_length"] == pytest.approx(1 + found["accepted_tokens"] / len(pairs))
    assert found["chance"] >= found["draft_acceptance_rate"] - 1e-12  # what follows a fallen token was never tried


@given(st.floats(0, 1), st.integers(0, 8))
def test_tokens_a_check_are_a_geometric_sum(chance: float, drafted: int) -> None:
    assert expected_tokens_per_verification(chance, drafted) == pytest.approx(
        sum(chance**i for i in range(drafted + 1)), rel=1e-6
    )


def test_speculation_beside_none(tmp_path: Path) -> None:
    text = tmp_path / "text.py"
    text.write_text("\n".join(f"def name_{i}(value):\n    return value + {i}\n" for i in range(40)))
    record = run_comparison(asked(SPECULATION, f"workload.texts=[{text}]"), tmp_path, "run", progress=False)
    rows = {row["variant"]: row for row in record.summary["rows"]}
    for name in ("draft of 2", "draft of 3", "draft that stops", "lookup"):
        row = rows[name]
        assert row["same_tokens_share"] == 1  # as the demo's texts part at no tie here
        losing = [int(load) for load, times in row["speed_up"].items() if times < 1]
        assert row["loses_from"] == (losing[0] if losing else None) and row["speed_up_alone"] == row["speed_up"]["1"]
        assert set(row["speed_up"]) == {"1", "2"} and row["predicted_speed_up"] > 0 and row["cost"] > 0
        assert 1 <= row["mean_acceptance_length"] <= 1 + row["num_speculative_tokens"]
    checks = record.read_table("verifications.parquet").to_pylist()
    stops = [check for check in checks if check["variant"] == "draft that stops"]
    assert len({check["drafted"] for check in stops}) > 1 and all(check["drafted"] <= 4 for check in stops)
    stopping = rows["draft that stops"]  # a verification of fewer tokens is reported as such, by position too
    assert stopping["mean_acceptance_length"] <= 1 + sum(check["drafted"] for check in stops) / len(stops)
    assert 1 + sum(stopping["acceptance_by_position"]) == pytest.approx(stopping["mean_acceptance_length"])
    assert "speed_up" not in rows["plain"] and rows["draft of 3, sampled"]["speed_up_alone"] > 0
    assert [each["claim"] for each in record.summary["verdicts"]] == ["spec-decode", "spec-acceptance"]
    assert len(record.read_table("runs.parquet").to_pylist()) == len(rows) * 2
    assert is_drawn(record) and "tokens a check" in shown(record)


@pytest.mark.parametrize("change", ["workload.output_tokens=2", "schedule.max_num_seqs=1"])
def test_a_load_that_never_decodes_together_is_refused(tmp_path: Path, change: str) -> None:
    text = tmp_path / "text.py"
    text.write_text("\n".join(f"def name_{i}(value):\n    return value + {i}\n" for i in range(40)))
    few = "variants={plain: {}}", f"workload.texts=[{text}]", "workload.loads=[2]", change
    refuses("workload.loads: 2 sequences never decode", lambda: measure_variants(asked(SPECULATION, *few)))


def test_a_run_that_speculates_tells_of_it(tmp_path: Path) -> None:
    work = "workload={kind: random, requests: 2, prompt_tokens: 9, output_tokens: 60}"
    given = asked(TINY, work, "speculate={kind: prompt_lookup, min_ngram: 1}", "sampling.temperature=0")
    record = run(given, tmp_path, progress=False)
    found = record.summary["speculation"]
    checks = record.read_table("verifications.parquet").to_pylist()
    assert found["verifications"] == len(checks) > 0
    assert found["accepted_tokens"] == sum(check["accepted"] for check in checks)
    steps = record.read_table("steps.parquet").to_pylist()
    assert sum(step["accepted_tokens"] for step in steps) == found["accepted_tokens"]
    assert sum(step["decode_tokens"] for step in steps) == 2 * 59
    assert "draft_acceptance_rate" in shown(record)


def test_the_experiment_that_ships_can_be_read() -> None:
    shipped = Experiment.from_file(Path(__file__).parents[2] / "experiments" / "speculation.yaml")
    assert {shipped.variant(name).speculate.kind for name in shipped.variants} == {"none", "draft", "prompt_lookup"}


BUILT: list[list[str]] = []


class Counted(Proposer):
    """A proposer that keeps the requests that it has seen, whatever has ended."""

    def __init__(self, target):
        self.seen: list[str] = []
        BUILT.append(self.seen)

    def propose(self, sequences, counts):
        self.seen += [each.request_id for each in sequences]
        return [NO_DRAFT for _ in sequences]


def test_a_proposer_of_ones_own_meets_the_texts_of_a_run_for_the_first_time() -> None:
    """Otherwise it would know them from the run before, and its drafts of the same texts would look good."""
    BUILT.clear()
    own = f"variants={{plain: {{speculate.kind: none}}, own: {{speculate: {{path: '{__name__}:Counted'}}}}}}"
    work = "workload={kind: speculation, prompts: 2, prompt_tokens: 24, output_tokens: 6, loads: [1], rounds: 2}"
    measure_variants(asked(SPECULATION, "model.name=demo-draft", "sampling.temperature=1", "judge=null", own, work))
    runs = [seen for seen in BUILT if seen]
    assert len(runs) == 3  # one to warm up and two rounds
    assert all(list(dict.fromkeys(seen)) == ["r0", "r1"] for seen in runs)
