"""Goodput: requests that attain a service-level objective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.experiment.experiment import SLO
from workbench.runs.metrics import per_request
from workbench.trace.recorder import Recorder

ROUNDING_TOLERANCE = 1 + 1e-9


def goodput(requests: Sequence[Mapping[str, Any]], slo: SLO, seconds: float | None) -> dict[str, Any]:
    """Count the requests that attain the SLO: first token within `slo.ttft`, mean time per later token within
    `slo.tpot`.

    Args:
        requests: Metrics of requests with `ttft_s` (None: no token) and `tpot_s` (None: no second token).
        slo: The objective, in seconds.
        seconds: Duration of the run; None or 0 gives no rate.

    Returns:
        The SLO, the number of attaining requests, their fraction (`share`), and their rate (`requests_per_s`).
    """
    kept = [each for each in requests if _meets_slo(each, slo)]
    return {
        "ttft_s": slo.ttft,
        "tpot_s": slo.tpot,
        "requests": len(kept),
        "share": len(kept) / len(requests) if requests else None,
        "requests_per_s": len(kept) / seconds if seconds else None,
    }


def recorded_goodput(recorder: Recorder, slo: SLO, seconds: float | None) -> dict[str, Any]:
    """Return the goodput of a recorded run."""
    return goodput(per_request(recorder.requests(), recorder.tokens()), slo, seconds)


def _meets_slo(figures: Mapping[str, Any], slo: SLO) -> bool:
    ttft, tpot = figures["ttft_s"], figures["tpot_s"]
    return (
        ttft is not None
        and ttft <= slo.ttft * ROUNDING_TOLERANCE
        and (tpot is None or tpot <= slo.tpot * ROUNDING_TOLERANCE)
    )
