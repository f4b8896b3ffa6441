"""Judge the simulator's predictions of fleets by the rule of `fleet_prediction.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.errors import WorkbenchError
from workbench.experiment.verdict import RuleChange, VariantRows, Verdict

WITHIN = 0.2  # of the measured figure
HALF = 0.5  # of the figures
CHANGED = (
    RuleChange(
        what=(
            "step times have a part for steps with prompt tokens and one for steps with decodes, and are no longer "
            "scaled to the sum of all steps; the rule and the experiment stayed"
        ),
        when="2026-11-26",
        after="a first run (fleet_prediction-20261126-045413): two pools were predicted 36 to 43% too slow",
        why="a step with both runs two sets of kernels, and an engine of a pool has steps of one kind",
    ),
    RuleChange(
        what="a replica is killed at second 2.2 and no longer at 4; the rule stayed",
        when="2026-11-26",
        after="its second run (fleet_prediction-20261126-050456), whose kill met a replica that had next to nothing",
        why=(
            "the median of the moved requests was 0; by the simulator with that run's calibration instance 0 has three "
            "requests at second 2.2, all with tokens"
        ),
    ),
)
JUDGED = ("ttft_s_p50", "ttft_s_p90", "tpot_s_p50", "tpot_s_p90")


def judge(rows: VariantRows) -> list[Verdict]:
    """Judge all variants together; the verdict's reason names each figure whose error exceeds the tolerance."""
    off = {(row["variant"], name): error(row, name) for row in rows for name in JUDGED}
    far = {key: each for key, each in off.items() if abs(each) > WITHIN}
    words = ", ".join(f"{name} of {variant} by {each:+.0%}" for (variant, name), each in far.items())
    worst = max(off.values(), key=abs)
    kept = 1 - len(far) / len(off)
    return [
        Verdict(
            claim="simulated-fleets",
            says="A simulator that was fitted to engines of a machine predicts fleets of them",
            rule=(
                f"predicted TTFT and TPOT, p50 and p90, within {WITHIN:.0%} of the measured medians of the rounds, in "
                "every variant: holds; at least half of the figures: with limits; else refuted"
            ),
            outcome="holds" if not far else "holds-with-limits" if kept >= HALF else "refuted",
            reason=f"{len(off) - len(far)} of {len(off)} figures are; the worst is off by {worst:+.0%}"
            + (f"; off: {words}" if far else ""),
            limits=f"off: {words}",
            figures={"figures within": kept, "worst": worst},
            changed=CHANGED,
        )
    ]


def error(row: Mapping[str, Any], name: str) -> float:
    """Return the relative error of a predicted figure: predicted / measured - 1."""
    if "prediction" not in row:
        raise WorkbenchError(f"variant {row['variant']!r}: has no prediction; leave executor.predict on")
    return row["prediction"][name] / row[name] - 1
