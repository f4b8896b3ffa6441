"""Every experiment that has a judge can be read, and what figures say that no record shows (see `test_claims.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments import apart, fleet_prediction, sparse_decode, speculation, thinking
from tests.helpers.refusals import refuses
from workbench.claims.claim import load_claims
from workbench.experiment.experiment import Experiment
from workbench.experiment.variants import every_variant
from workbench.experiment.verdict import Verdict, variant_row, verdicts
from workbench.request import CustomPart

EXPERIMENTS = Path(apart.__file__).parent
JUDGED = sorted(file.stem for file in EXPERIMENTS.glob("*.yaml") if "\njudge:" in file.read_text())


@pytest.mark.parametrize("name", JUDGED)
def test_an_experiment_can_be_read_and_names_its_judge(name: str) -> None:
    experiment = Experiment.from_file(EXPERIMENTS / f"{name}.yaml")
    again = Experiment.from_yaml(experiment.to_yaml())
    assert again == experiment and every_variant(again) == every_variant(experiment)
    assert experiment.is_comparison and len(JUDGED) > 25
    assert experiment.judge is not None and experiment.judge.arguments == {"run": name}


def strict(rows, most: float = 1.0) -> list[Verdict]:
    good = all(row["kl_mean"] <= most for row in rows)
    return [Verdict("mine", "small", f"at most {most}", "holds" if good else "refuted", "so")]


def nonsense(rows) -> list[str]:
    return ["holds"]


def test_a_judge_of_ones_own_with_arguments() -> None:
    rows = [{"variant": "a", "kl_mean": 0.5}]
    path = f"{__name__}:strict"
    assert verdicts(CustomPart(path=path), rows)[0].outcome == "holds"
    assert verdicts(CustomPart(path=path, arguments={"most": 0.1}), rows)[0].outcome == "refuted"
    assert verdicts(None, rows) == []
    refuses("returned str, must return Verdict values", lambda: verdicts(CustomPart(path=f"{__name__}:nonsense"), rows))
    refuses("needs a variant 'b'; this run has a", variant_row, rows, "b")


def test_figures_have_what_was_predicted_and_ask_for_a_prediction_where_they_need_one() -> None:
    predicted = {"longest_gap_s_p99": 0.2, "slo_attainment": 1.0}
    one = {"variant": apart.CHUNKS, "longest_gap_s_p99": 0.1, "slo_attainment": 0.9, "prediction": predicted}
    two = {"variant": apart.SHARED, "longest_gap_s_p99": 0.05, "slo_attainment": 0.9}
    assert apart.pays([one, two]) == {"gap_times": 0.5, "attainment_times": 1.0}
    assert apart.pays([one, {**two, "prediction": predicted}])["predicted_gap_times"] == 1.0
    row = {"variant": "two replicas", **dict.fromkeys(fleet_prediction.JUDGED, 0.1)}
    refuses("has no prediction", fleet_prediction.prediction_errors, [row])


def test_the_distribution_that_is_judged_is_the_engines_own_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figure is the sum that the engine's rule gives; a wrong rule in its place is seen."""
    assert speculation.off_by("engine") < 1e-12
    assert speculation.off_by("ignores the draft") > 0.1 and speculation.off_by("one off") > 0.1
    row = {"speed_up_alone": 2.5, "predicted_speed_up": 2.5, "same_tokens_share": 1.0, "chance": 0.7,
           "num_speculative_tokens": 3, "loses_from": 4}  # fmt: skip
    rows = [{"variant": name, **row} for name in ("draft of 2", "draft of 3", "draft of 3, sampled")]
    claim = load_claims()["spec-decode"]
    assert claim.judge(claim.trials[0], speculation.faster(rows)).outcome == "holds"
    monkeypatch.setitem(speculation.RULES, "engine", speculation.ignores_draft)
    speculation.off_by.cache_clear()
    try:
        assert claim.judge(claim.trials[0], speculation.faster(rows)).outcome == "refuted"
    finally:
        speculation.off_by.cache_clear()


@given(st.lists(st.floats(0.1, 10), min_size=3, max_size=3))
def test_a_sparse_step_is_held_to_full_attention(seconds: list[float]) -> None:
    of_sparse = dict(zip(sparse_decode.BACKENDS, seconds, strict=True))
    rows = [
        {"variant": f"{name}, {kind}", "curve": [{"decode_step_s": of_sparse[name] if kind == "sparse" else 2.0}]}
        for name in sparse_decode.BACKENDS
        for kind in ("full", "sparse")
    ]
    assert sparse_decode.sparse_over_full(rows) == {name: value / 2 for name, value in of_sparse.items()}


@given(st.lists(st.floats(0, 1), min_size=4, max_size=4), st.floats(0, 1), st.floats(1, 100))
def test_budgets_of_thoughts(right: list[float], of_a_kind: float, most: float) -> None:
    tokens = (30, 45, 60, most)
    rows = [
        {"variant": str(budget), "right": share, "output_tokens_per_question": used,
         "right_by_kind": {"talk": 1.0, "worked_out": (budget != "0") * of_a_kind}}
        for budget, share, used in zip(thinking.BUDGETS, right, tokens, strict=True)
    ]  # fmt: skip
    found = thinking.accuracy(rows)
    assert found["gain"] == max(right[1:]) - right[0] and found["gain_in_one_kind"] == of_a_kind
    assert found["kind"] == ("worked_out" if of_a_kind else "talk")
    assert thinking.cost(rows) == {"tokens_times": most / 60, "tokens_times_of_a_thought": 2.0}
