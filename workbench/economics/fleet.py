"""Size fleets for many users: instances, accelerators, KV transfers over the network, and money."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from workbench.economics.prices import cost_per_million
from workbench.errors import WorkbenchError
from workbench.experiment.experiment import Experiment
from workbench.measure.simulated import simulated_executor_of

SECONDS_PER_DAY = 86_400


@dataclass(frozen=True)
class Demand:
    """Demand of `users` users, each of whom sends `requests_a_day` requests; the peak rate is `peak` times the average.

    Raises:
        WorkbenchError: If a number is not above 0, or the peak is below the average.
    """

    users: int
    requests_a_day: float
    peak: float

    def __post_init__(self) -> None:
        if self.users < 1 or not self.requests_a_day > 0 or not self.peak >= 1:
            raise WorkbenchError(
                f"{self.users} users, {self.requests_a_day:g} requests a day, peak {self.peak:g}: give at least one "
                "user, requests above 0, and a peak of at least 1 (times the average)"
            )

    @property
    def mean_rate(self) -> float:
        """Return the average number of requests per second."""
        return self.users * self.requests_a_day / SECONDS_PER_DAY

    @property
    def peak_rate(self) -> float:
        return self.mean_rate * self.peak


def fleets_for(found: dict[str, Any], demand: Demand, experiment: Experiment, per_hour: float | None) -> dict[str, Any]:
    """Return the number of fleets like that of `experiment` that serve `demand` at its peak, the bytes of their KV
    transfers, and their cost.

    Args:
        found: The result of `highest_rate`.
        demand: The users.
        experiment: The experiment of `found`.
        per_hour: Price of one accelerator an hour; None leaves the money out.
    """
    metrics, executor = found["at_rate"], simulated_executor_of(experiment)
    instances = executor.instances + (executor.decode.instances if executor.decode else 0)
    submitted, fleets = metrics["requests"]["submitted"], math.ceil(demand.peak_rate / found["rate"])
    accelerators = fleets * instances * executor.gpus * executor.pipeline
    output_tokens = metrics["tokens"]["output"] / submitted
    sent = metrics["handed_over"]
    sized = {
        "users": demand.users,
        "requests_a_day": demand.requests_a_day,
        "mean_rate": demand.mean_rate,
        "peak_rate": demand.peak_rate,
        "fleets": fleets,
        "instances": fleets * instances,
        "accelerators": accelerators,
        "prompt_tokens_per_s": demand.peak_rate * metrics["tokens"]["prompt"] / submitted,
        "output_tokens_per_s": demand.peak_rate * output_tokens,
        "handed_over_bytes_per_s": demand.peak_rate * sent["bytes"] / sent["sequences"] if sent else None,
    }
    if per_hour is not None:
        hourly = accelerators * per_hour
        cost = cost_per_million(hourly, demand.mean_rate * output_tokens)
        sized |= {
            "per_hour": hourly,
            "per_day": 24 * hourly,
            "per_user_a_month": 30 * 24 * hourly / demand.users,
            "per_million_output_tokens": float(cost),
        }
    return sized
