"""Figures of `fleet_prediction.yaml`: how far the simulator's predictions of fleets are off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.errors import WorkbenchError
from workbench.experiment.verdict import VariantRows

WITHIN = 0.2  # of the measured figure
JUDGED = ("ttft_s_p50", "ttft_s_p90", "tpot_s_p50", "tpot_s_p90")


def prediction_errors(rows: VariantRows) -> dict[str, float | str]:
    """Return the share of predicted TTFT and TPOT, p50 and p90, within 20% of the measured medians of the rounds, over
    all variants; the largest error; and the figures that are farther off."""
    off = {f"{name} of {row['variant']}": error(row, name) for row in rows for name in JUDGED}
    far = {name: each for name, each in off.items() if abs(each) > WITHIN}
    return {
        "share_within": 1 - len(far) / len(off),
        "largest_error": max(off.values(), key=abs),
        "farther_off": ", ".join(f"{name} by {each:+.0%}" for name, each in far.items()),
    }


def error(row: Mapping[str, Any], name: str) -> float:
    """Return the relative error of a predicted figure: predicted / measured - 1."""
    if "prediction" not in row:
        raise WorkbenchError(f"variant {row['variant']!r}: has no prediction; leave executor.predict on")
    return row["prediction"][name] / row[name] - 1
