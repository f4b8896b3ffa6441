"""Goodput: requests that attain a service-level objective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.study.experiment import Promise
from workbench.study.metrics import per_request
from workbench.trace.recorder import Recorder

ROUNDING = 1 + 1e-9


def goodput(figures: Sequence[Mapping[str, Any]], promise: Promise, seconds: float | None) -> dict[str, Any]:
    """Count the requests that attain the SLO: first token within `slo.ttft`, mean time per later token within
    `slo.tpot`.

    Args:
        requests: Metrics of requests with `ttft_s` (None: no token) and `tpot_s` (None: no second token).
        slo: The objective, in seconds.
        seconds: Duration of the run; None or 0 gives no rate.

    Returns:
        The SLO, the number of attaining requests, their fraction (`share`), and their rate (`requests_per_s`).
    """
    kept = [each for each in figures if _kept(each, promise)]
    return {
        "ttft_s": promise.ttft,
        "tpot_s": promise.tpot,
        "requests": len(kept),
        "share": len(kept) / len(figures) if figures else None,
        "requests_per_s": len(kept) / seconds if seconds else None,
    }


def recorded_goodput(recorder: Recorder, promise: Promise, seconds: float | None) -> dict[str, Any]:
    """Return the goodput of a recorded run."""
    return goodput(per_request(recorder.requests(), recorder.tokens()), promise, seconds)


def _kept(figures: Mapping[str, Any], promise: Promise) -> bool:
    ttft, tpot = figures["ttft_s"], figures["tpot_s"]
    return ttft is not None and ttft <= promise.ttft * ROUNDING and (tpot is None or tpot <= promise.tpot * ROUNDING)
