"""Compute goodput: the requests that attain a service-level objective (SLO)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.experiment.experiment import SLO
from workbench.runs.metrics import COMPLETED, per_request
from workbench.trace.recorder import Recorder

ROUNDING_TOLERANCE = 1 + 1e-9


def goodput(requests: Sequence[Mapping[str, Any]], slo: SLO, seconds: float | None) -> dict[str, Any]:
    """Summarize the requests that attain the SLO: completed, with the first token within `slo.ttft` and a mean time per
    later token within `slo.tpot`. A request with a deadline must also have its last token by then.

    Args:
        requests: Metrics of requests: `ttft_s`, `tpot_s` (None: no second token), `e2el_s` (None: not completed,
            because it failed or still runs), and `deadline_s` (None or missing: no deadline).
        slo: The objective, in seconds.
        seconds: Duration of the run; without it (None or 0) no rate is computed.

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
    """Return the goodput of a recorded run. Refused requests are not counted."""
    requests = [row for row in recorder.requests() if row["finish_reason"] != "refused"]
    figures = per_request(requests, recorder.tokens())
    for row, each in zip(requests, figures, strict=True):
        if row["finish_reason"] not in COMPLETED:
            each["e2el_s"] = None
    return goodput(figures, slo, seconds)


def _meets_slo(figures: Mapping[str, Any], slo: SLO) -> bool:
    ttft, tpot, e2el, deadline = figures["ttft_s"], figures["tpot_s"], figures["e2el_s"], figures.get("deadline_s")
    return (
        e2el is not None
        and (deadline is None or e2el <= deadline * ROUNDING_TOLERANCE)
        and ttft is not None
        and ttft <= slo.ttft * ROUNDING_TOLERANCE
        and (tpot is None or tpot <= slo.tpot * ROUNDING_TOLERANCE)
    )
