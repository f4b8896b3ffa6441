"""The highest rate of requests that a simulated fleet serves within an SLO."""

from __future__ import annotations

import math
import time
from typing import Any

from workbench.errors import WorkbenchError
from workbench.experiment.experiment import Experiment
from workbench.measure.jobs import SPREADS, job_metrics
from workbench.measure.simulated import describe_simulation, fleet_for, fleet_metrics
from workbench.simulate.traffic_settings import Poisson, TrafficWorkload

PRECISION = 0.03  # of a rate: the search ends when the bounds are this near
HIGHEST_RATE = 2.0**14  # requests/s; no fleet of this size is simulated in a reader's time
LOWEST_RATE = 1e-3  # requests/s; requests this rare are alone
MIN_COUNTED = 200  # requests; the share of so many that are within an SLO has a standard error of 2 points at 90%


def at_rate(experiment: Experiment, rate: float, seconds: float) -> Experiment:
    """Return the experiment with `seconds` of its traffic, or more where they have few requests, which come
    independently, `rate` a second."""
    workload = experiment.workload
    if not isinstance(workload, TrafficWorkload):
        raise WorkbenchError(f"workload.kind {workload.kind!r}: a rate is one of traffic; give `kind: traffic`")
    arrivals = {"arrivals": Poisson(rate=rate), "requests": max(math.ceil(rate * seconds), 2 * MIN_COUNTED)}
    return experiment.model_copy(update={"workload": workload.model_copy(update=arrivals)})


def metrics_at_rate(experiment: Experiment, rate: float, seconds: float) -> dict[str, Any]:
    """Simulate the fleet at a rate, to the end, and return its metrics.

    Spreads and goodput are of the `counted` requests, the half in the middle: those before fill the empty fleet, those
    after keep it full while the counted ones are answered.
    """
    began, tried = time.perf_counter(), at_rate(experiment, rate, seconds)
    fleet, slo = fleet_for(tried).run(), tried.measure.slo
    quarter = len(fleet.jobs) // 4
    counted = fleet.jobs[quarter : len(fleet.jobs) - quarter]
    of_counted = job_metrics(counted, slo, None)
    return {
        **fleet_metrics(fleet, slo, began),
        **{name: of_counted[name] for name in (*SPREADS, "goodput")},
        "counted": len(counted),
        "about": describe_simulation(tried),
    }


def highest_rate(experiment: Experiment, share: float, seconds: float) -> dict[str, Any]:
    """Search the highest rate at which a `share` of the requests is within the experiment's SLO.

    The rate is doubled until too many requests are late, and the range halved until it is known to 3%. More requests
    are assumed to make no fewer late.

    Args:
        experiment: An experiment with a simulated executor and traffic, whose arrivals are replaced.
        share: The share of requests within the SLO, above 0 and up to 1.
        seconds: Seconds of traffic that each rate is tried with; more at a rate with fewer than twice `MIN_COUNTED`
            requests in that time.

    Returns:
        `rate`, the lowest rate `too_high` that was found to be too high, and `at_rate`: the metrics of the fleet there.

    Raises:
        WorkbenchError: `share` or `seconds` is out of range, or every rate or none is within the SLO.
    """
    if not 0 < share <= 1 or not seconds > 0:
        raise WorkbenchError(f"share {share:g}, seconds {seconds:g}: give a share in (0, 1] and seconds above 0")
    low, high, best = 0.0, 1.0, None
    while (found := metrics_at_rate(experiment, high, seconds))["goodput"]["share"] >= share:
        low, high, best = high, 2 * high, found
        if high > HIGHEST_RATE:
            raise WorkbenchError(f"{low:g} requests/s and more are within the SLO: give a stricter one")
    if best is None:
        low, best = LOWEST_RATE, metrics_at_rate(experiment, LOWEST_RATE, seconds)
        if best["goodput"]["share"] < share:
            slo = experiment.measure.slo
            raise WorkbenchError(
                f"a request alone is not within the SLO (TTFT {slo.ttft:g} s, TPOT {slo.tpot:g} s): "
                "give a looser one, or faster instances"
            )
    while high - low > PRECISION * high:
        middle = (low + high) / 2
        found = metrics_at_rate(experiment, middle, seconds)
        low, high, best = (middle, high, found) if found["goodput"]["share"] >= share else (low, middle, best)
    return {"share": share, "seconds": seconds, "rate": low, "too_high": high, "at_rate": best}
