"""Figures of `queue_tail.yaml`: the tail of queueing time.

Traffic is as recorded (lengths fitted to Azure's and Mooncake's hours, Poisson arrivals): no request is put behind a
long prompt by hand. Azure's prompts end at 7,437 tokens, Mooncake's at about 128,000, so that only Mooncake's traffic
has many long prompts, the cause that the claim names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.experiment.verdict import VariantRows, variant_row

TRAFFICS = ("Azure", "Mooncake")
FINE = 2.0  # times the lightest load's median that look fine
MEDIAN, TAIL = "short_ttft_s_p50", "short_ttft_s_p99"


def tails(rows: VariantRows) -> dict[str, float]:
    """Return, for each traffic, TTFT of prompts of up to 2,048 tokens among all, computed whole, first come first
    served: at the highest load up to which their median stays within twice the lightest load's, the growth of p99 and
    of the median, and that load in requests a second."""
    figures = {}
    for name in TRAFFICS:
        load, tail, median = _spread(variant_row(rows, name)["curve"])
        figures |= {
            f"{name.lower()}_p99_times": tail,
            f"{name.lower()}_p50_times": median,
            f"{name.lower()}_load": load,
        }
    return figures


def _spread(curve: Sequence[Mapping[str, Any]]) -> tuple[float, float, float]:
    """Return the highest load with a fine median, and the growth of p99 and median there."""
    first = last = curve[0]
    for point in curve:
        if point[MEDIAN] > FINE * first[MEDIAN]:
            break
        last = point
    return float(last["value"]), last[TAIL] / first[TAIL], last[MEDIAN] / first[MEDIAN]
