"""The requests of a fleet of processes: the requests of a round, and other requests of the same traffic to fit step
times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from workbench.engine.inputs import arrival
from workbench.errors import WorkbenchError
from workbench.experiment.build import clients_of, requests_of
from workbench.experiment.experiment import Experiment
from workbench.measure.simulation import tokenizer_of
from workbench.memory.capacity import spec_and_dtype
from workbench.request import Request
from workbench.simulate.arrival import Arrival
from workbench.simulate.executor_settings import ProcessesExecutor


@dataclass(frozen=True)
class FleetTraffic:
    """Requests with their arrival times, in order."""

    requests: tuple[Request, ...]

    @property
    def arrivals(self) -> dict[str, Arrival]:
        """Return each request as an `Arrival`, the form that a simulated fleet takes, by id."""
        return {
            each.request_id: Arrival(
                arrival(each), len(each.prompt_ids), each.sampling.max_tokens, each.tenant, each.cache_salt,
                priority=each.priority, deadline=each.deadline, predicted_tokens=each.predicted_tokens,
            )
            for each in self.requests
        }  # fmt: skip

    def of_round(self, name: str) -> list[Request]:
        """Return the requests for one round, with prompts that no other round has put into a prefix cache."""
        return [replace(each, cache_salt=f"{each.cache_salt}/{name}") for each in self.requests]

    def at_once(self, most: int) -> FleetTraffic:
        """Return the first `most` requests, all arriving at second 0."""
        return FleetTraffic(tuple(replace(each, arrival=0.0) for each in self.requests[:most]))


def processes_executor_of(experiment: Experiment) -> ProcessesExecutor:
    """Return the processes executor of an experiment's variant. Raises WorkbenchError if it has another executor."""
    if not isinstance(experiment.executor, ProcessesExecutor):
        raise WorkbenchError(
            f"executor: kind {experiment.executor.kind} in one variant and processes in others; use one kind"
        )
    return experiment.executor


def measured_traffic(experiment: Experiment) -> FleetTraffic:
    """Return the requests to measure. Raises WorkbenchError for a workload without requests."""
    if clients_of(experiment) is not None:
        raise WorkbenchError("workload.arrivals: closed_loop; a fleet of processes needs requests with arrival times")
    return FleetTraffic(_in_order(_requests(experiment)))


def calibration_traffic(experiment: Experiment, count: int) -> FleetTraffic:
    """Return `count` requests for calibration that are not measured: the next requests of a traffic, or new draws of a
    random workload.

    If the traffic has no further requests, or prompts are given, return the first of the measured requests."""
    if (continued := experiment.workload.continued(count)) is not None:
        other, first = continued
        found = _in_order(_requests(experiment.model_copy(update={"workload": other})))[first:]
        if len(found) == count:
            return FleetTraffic(tuple(replace(each, arrival=arrival(each) - arrival(found[0])) for each in found))
    return FleetTraffic(measured_traffic(experiment).requests[:count])


def _requests(experiment: Experiment) -> list[Request]:
    if (work := experiment.workload).is_comparison:
        raise WorkbenchError(
            f"workload: kind {work.kind} is for one engine; processes serve the kinds traffic, random and prompts"
        )
    return requests_of(experiment, tokenizer_of(experiment), spec_and_dtype(experiment)[0].vocab_size)


def _in_order(requests: Sequence[Request]) -> tuple[Request, ...]:
    return tuple(sorted(requests, key=arrival))
