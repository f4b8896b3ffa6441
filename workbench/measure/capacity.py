"""The highest rate of requests that a simulated fleet serves within an SLO."""

from __future__ import annotations

import math
from typing import Any

from workbench.errors import WorkbenchError
from workbench.experiment.experiment import Experiment
from workbench.measure.simulation import simulate_experiment
from workbench.simulate.traffic_settings import Poisson, TrafficWorkload

PRECISION = 0.03  # of a rate: the search ends when the bounds are this near
HIGHEST_RATE = 2.0**14  # requests/s; no fleet of this size is simulated in a reader's time
OVERLOAD_SECONDS = 60.0  # after the last arrival at which what is unfinished counts as late


def at_rate(experiment: Experiment, rate: float, seconds: float) -> Experiment:
    """Return the experiment with `seconds` of its traffic, whose requests come independently, `rate` a second."""
    workload = experiment.workload
    if not isinstance(workload, TrafficWorkload):
        raise WorkbenchError(f"workload.kind {workload.kind!r}: a rate is one of traffic; give `kind: traffic`")
    arrivals = {"arrivals": Poisson(rate=rate), "requests": math.ceil(rate * seconds)}
    return experiment.model_copy(update={"workload": workload.model_copy(update=arrivals)})


def highest_rate(experiment: Experiment, share: float, seconds: float) -> dict[str, Any]:
    """Search the highest rate at which a `share` of all requests is within the experiment's SLO.

    The rate is doubled until too many requests are late, and the range halved until it is known to 3%. More requests
    are assumed to make no fewer late.

    Args:
        experiment: An experiment with a simulated executor and traffic, whose arrivals are replaced.
        share: The share of requests within the SLO, above 0 and up to 1.
        seconds: Seconds of traffic that each rate is tried with.

    Returns:
        `rate`, the lowest rate `too_high` that was found to be too high, and `at_rate`: the metrics of the fleet there.

    Raises:
        WorkbenchError: `share` or `seconds` is out of range, or every rate or none is within the SLO.
    """
    if not 0 < share <= 1 or not seconds > 0:
        raise WorkbenchError(f"share {share:g}, seconds {seconds:g}: give a share in (0, 1] and seconds above 0")

    def tried(rate: float) -> dict[str, Any]:
        return simulate_experiment(at_rate(experiment, rate, seconds), seconds + OVERLOAD_SECONDS)

    low, high, best = 0.0, 1.0, None
    while (found := tried(high))["goodput"]["share"] >= share:
        low, high, best = high, 2 * high, found
        if high > HIGHEST_RATE:
            raise WorkbenchError(f"{low:g} requests/s and more are within the SLO: give a stricter one")
    while high - low > PRECISION * high:
        if high < 1 / seconds:
            slo = experiment.measure.slo
            raise WorkbenchError(
                f"a request alone is not within the SLO (TTFT {slo.ttft:g} s, TPOT {slo.tpot:g} s): "
                "give a looser one, or faster instances"
            )
        middle = (low + high) / 2
        found = tried(middle)
        low, high, best = (middle, high, found) if found["goodput"]["share"] >= share else (low, middle, best)
    return {"share": share, "seconds": seconds, "rate": low, "too_high": high, "at_rate": best}
