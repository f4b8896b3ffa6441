"""Every experiment that has a judge can be read; judges themselves are held by the examples of their claims
(`test_claims.py`), and here where no claim shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments import apart, fleet_prediction, speculation, thinking
from tests.helpers.refusals import refuses
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
    assert experiment.judge is not None and experiment.judge.path == f"experiments.{name}:judge"


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


def test_a_judge_says_what_was_predicted_and_asks_for_a_prediction_where_it_needs_one() -> None:
    predicted = {"longest_gap_s_p99": 0.2, "slo_attainment": 1.0}
    one = {"variant": apart.CHUNKS, "longest_gap_s_p99": 0.1, "slo_attainment": 0.9, "prediction": predicted}
    two = {"variant": apart.SHARED, "longest_gap_s_p99": 0.05, "slo_attainment": 0.9}
    assert "predicted nothing" in apart.pays([one, two]).reason
    wanted = "predicted 200 ms against 200 ms, and 100% against 100%"
    assert wanted in apart.pays([one, {**two, "prediction": predicted}]).reason
    refuses(
        "has no prediction",
        lambda: fleet_prediction.judge([{"variant": "two replicas", **dict.fromkeys(fleet_prediction.JUDGED, 0.1)}]),
    )


def test_the_distribution_that_is_judged_is_the_engines_own_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdict's figure is the sum that the engine's rule gives; a wrong rule in its place is seen."""
    assert speculation.off_by("engine") < 1e-12
    assert speculation.off_by("ignores the draft") > 0.1 and speculation.off_by("one off") > 0.1
    row = {"speed_up_alone": 2.5, "predicted_speed_up": 2.5, "same_tokens_share": 1.0, "chance": 0.7,
           "num_speculative_tokens": 3, "loses_from": 4}  # fmt: skip
    rows = [{"variant": name, **row} for name in ("draft of 2", "draft of 3", "draft of 3, sampled")]
    assert speculation.faster(rows).outcome == "holds"
    monkeypatch.setitem(speculation.RULES, "engine", speculation.ignores_draft)
    speculation.off_by.cache_clear()
    try:
        assert speculation.faster(rows).outcome == "refuted"
    finally:
        speculation.off_by.cache_clear()


@pytest.mark.parametrize(
    ("right", "of_a_kind", "most", "outcomes"),
    [
        ((0.8, 0.8, 0.86, 0.85), 0.5, 60, ["holds", "holds"]),
        ((0.8, 0.7, 0.81, 0.8), 0.3, 70, ["holds-with-limits", "holds-with-limits"]),
        ((0.8, 0.7, 0.81, 0.8), 0.1, 90, ["refuted", "refuted"]),
    ],
)
def test_budgets_of_thoughts(right: tuple[float, ...], of_a_kind: float, most: float, outcomes: list[str]) -> None:
    """No claim of the ledger shows them."""
    tokens = (30, 45, 60, most)
    rows = [
        {"variant": str(budget), "right": share, "questions": 100, "output_tokens_per_question": used,
         "seconds_per_question": 1.0, "right_by_kind": {"talk": 1.0, "worked_out": 0.2 + (budget == "64") * of_a_kind}}
        for budget, share, used in zip(thinking.BUDGETS, right, tokens, strict=True)
    ]  # fmt: skip
    found = thinking.judge(rows)
    assert [each.claim for each in found] == ["thinking-accuracy", "thinking-budget-cost"]
    assert [each.outcome for each in found] == outcomes
    assert all(each.rule and each.reason and each.says for each in found)
