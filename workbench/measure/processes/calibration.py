"""Fit step times to engines in processes of this machine, and measure the overhead of a fleet.

As many engines as the fleet has serve a part of the traffic at its own arrival times, because steps are slower while
other engines use the same cores, memory and caches. Also measured: the seconds of messages before and after a first
token, and the seconds from an engine's death until its successor serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any

from workbench.cluster.process_fleet import OpenFleet, ProcessFleet, wait_until_whole
from workbench.engine.config import EngineConfig
from workbench.errors import WorkbenchError
from workbench.measure.processes.stream import ServedTraffic, serve_traffic
from workbench.measure.processes.traffic import FleetTraffic
from workbench.request import Request
from workbench.runs.metrics import percentile
from workbench.simulate.executor_settings import ProcessesExecutor
from workbench.simulate.step_times import TICKS_PER_SECOND, StepTimeModel, fit_step_times, step_seconds, step_work_of
from workbench.trace.events import Decoded

PROBES = 9  # number of requests, one after another, that measure message times
PROBE_TOKENS = 8


@dataclass(frozen=True)
class Calibration:
    """Measurements of `engines` engines: their step times, the seconds of messages per first token, and the seconds
    until a killed engine's successor serves (None if no engine was killed)."""

    engines: int
    times: StepTimeModel
    message_seconds: float
    start_seconds: float | None
    errors: dict[str, float | None]  # errors of the fit: |fitted / measured - 1| of a step

    def as_dict(self) -> dict[str, Any]:
        (cost,) = self.times.costs
        return {
            "engines": self.engines, "fit": self.times.name, "step_s": cost.step / TICKS_PER_SECOND,
            "prefill_step_s": cost.prefill_step / TICKS_PER_SECOND,
            "decode_step_s": cost.decode_step / TICKS_PER_SECOND,
            "prefill_token_s": cost.prefill_tokens / TICKS_PER_SECOND,
            "decode_token_s": cost.decode_tokens / TICKS_PER_SECOND,
            "position_read_s": cost.positions_read[0] / TICKS_PER_SECOND, "errors": self.errors,
            "message_s": self.message_seconds, "start_s": self.start_seconds,
        }  # fmt: skip


def calibrate(
    config: EngineConfig, engines: int, threads: int, traffic: FleetTraffic, kills: bool, open_fleet: OpenFleet
) -> Calibration:
    """Measure `engines` engines after a warm-up. With `kills` also measure the time from an engine's death until its
    successor serves.
    """
    fleet = open_fleet(config, ProcessesExecutor(instances=engines), threads)
    try:
        serve_traffic(fleet, traffic.of_round("warm-up"))
        message = _message_seconds(fleet, traffic)
        served = serve_traffic(fleet, traffic.of_round("calibration"))
        start = _start_seconds(fleet, traffic) if kills else None
    finally:
        fleet.close()
    steps = served.steps()
    times = fit_step_times(steps, f"{engines} engines of {threads} threads")
    return Calibration(engines, times, message, start, fit_errors(times, steps))


def fit_errors(times: StepTimeModel, steps: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Return the relative errors of fitted step times: percentiles over the steps, and for each phase the error of the
    steps' total time."""
    measured = step_seconds(steps)
    fitted = [fitted_seconds(times, step) for step in steps]
    each = [abs(ours / its - 1) for ours, its in zip(fitted, measured, strict=True) if its]
    sums: dict[str, float | None] = {}
    for phase in dict.fromkeys(step["phase"] for step in steps):
        mine = [number for number, step in enumerate(steps) if step["phase"] == phase]
        sums[phase] = sum(fitted[number] for number in mine) / sum(measured[number] for number in mine) - 1
    return {"p50": percentile(each, 50), "p90": percentile(each, 90), **sums}


def fitted_seconds(times: StepTimeModel, step: dict[str, Any]) -> float:
    """Return the seconds that the fitted model gives for a recorded step."""
    work = step_work_of((), 0, times.kinds)._replace(
        prefill_tokens=step["prefill_tokens"], decode_tokens=step["decode_tokens"],
        positions_read=(step["context_tokens"],),
    )  # fmt: skip
    return times(work) / TICKS_PER_SECOND


def _message_seconds(fleet: ProcessFleet, traffic: FleetTraffic) -> float:
    """Return the median over single short requests of the time to first token that is not spent in steps."""
    found = []
    for number in range(PROBES):
        request = traffic.requests[number % len(traffic.requests)]
        sampling = request.sampling.model_copy(update={"max_tokens": 1})
        probe = Request(f"probe-{number}", request.prompt_ids[:PROBE_TOKENS], sampling, cache_salt=f"probe {number}")
        served = serve_traffic(fleet, [probe])
        found.append(_first_token(served, probe.request_id) - sum(step["wall_seconds"] for step in served.steps()))
    return max(0.0, median(found))


def _first_token(served: ServedTraffic, name: str) -> float:
    for event in served.events:
        if isinstance(event, Decoded) and event.request_id == name:
            return event.time - served.began
    raise WorkbenchError(f"{name}: it got no token; calibrate with requests that the model can serve")


def _start_seconds(fleet: ProcessFleet, traffic: FleetTraffic) -> float:
    """Return the seconds from an engine's death until its successor is ready, while the others serve."""
    with ThreadPoolExecutor(1) as other:
        fleet.kill(0)
        waited = other.submit(wait_until_whole, fleet)
        serve_traffic(fleet, traffic.of_round("start"))
        return waited.result()
