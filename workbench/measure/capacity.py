"""Find the highest request rate that a simulated fleet serves within an SLO."""

from __future__ import annotations

import math
import time
from typing import Any

from workbench.errors import WorkbenchError
from workbench.experiment.experiment import Experiment
from workbench.measure.jobs import SPREADS, job_metrics
from workbench.measure.simulated import describe_simulation, fleet_for, fleet_metrics
from workbench.simulate.traffic_settings import Poisson

PRECISION = 0.03  # the search ends when the bounds on the rate differ by this fraction
HIGHEST_RATE = 2.0**14  # requests/s; simulating more takes too long for an interactive command
LOWEST_RATE = 1e-3  # requests/s; at this rate requests do not overlap
MIN_COUNTED = 200  # requests; the measured share within the SLO then has a standard error of 2 points at 90%


def at_rate(experiment: Experiment, rate: float, seconds: float) -> Experiment:
    """Return the experiment with Poisson arrivals at `rate` requests a second for `seconds`, or for longer if too few
    requests would arrive in that time."""
    workload = experiment.workload
    if "arrivals" not in type(workload).model_fields:
        raise WorkbenchError(f"workload.kind {workload.kind!r}: only traffic has a rate; set `kind: traffic`")
    arrivals = {"arrivals": Poisson(rate=rate), "requests": max(math.ceil(rate * seconds), 2 * MIN_COUNTED)}
    return experiment.model_copy(update={"workload": workload.model_copy(update=arrivals)})


def metrics_at_rate(experiment: Experiment, rate: float, seconds: float) -> dict[str, Any]:
    """Simulate the fleet at a rate until all requests have ended, and return its metrics.

    Percentiles and goodput cover the `counted` requests, the middle half: earlier requests fill the empty fleet, and
    later ones keep it full while the counted requests are answered.
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
    """Find the highest rate at which a fraction `share` of the requests is within the experiment's SLO.

    The rate is doubled until too many requests are late; then the range is halved until the rate is known to 3%. The
    search assumes that a higher rate never makes fewer requests late.

    Args:
        experiment: An experiment with a simulated executor and traffic; its arrival times are replaced.
        share: The fraction of requests within the SLO, above 0 and up to 1.
        seconds: Simulated seconds of traffic at each rate; longer if fewer than twice `MIN_COUNTED` requests would
            arrive.

    Returns:
        `rate`, `too_high` (the lowest rate tried that was too high), and `at_rate`: the metrics of the fleet at `rate`.

    Raises:
        WorkbenchError: `share` or `seconds` is out of range, or every rate or no rate is within the SLO.
    """
    if not 0 < share <= 1 or not seconds > 0:
        raise WorkbenchError(f"share {share:g}, seconds {seconds:g}: share must be in (0, 1] and seconds above 0")
    low, high, best = 0.0, 1.0, None
    while (found := metrics_at_rate(experiment, high, seconds))["goodput"]["share"] >= share:
        low, high, best = high, 2 * high, found
        if high > HIGHEST_RATE:
            raise WorkbenchError(f"even {low:g} requests/s are within the SLO: set a stricter SLO")
    if best is None:
        low, best = LOWEST_RATE, metrics_at_rate(experiment, LOWEST_RATE, seconds)
        if best["goodput"]["share"] < share:
            slo = experiment.measure.slo
            raise WorkbenchError(
                f"even a single request misses the SLO (TTFT {slo.ttft:g} s, TPOT {slo.tpot:g} s): "
                "set a looser SLO, or faster instances"
            )
    while high - low > PRECISION * high:
        middle = (low + high) / 2
        found = metrics_at_rate(experiment, middle, seconds)
        low, high, best = (middle, high, found) if found["goodput"]["share"] >= share else (low, middle, best)
    return {"share": share, "seconds": seconds, "rate": low, "too_high": high, "at_rate": best}
