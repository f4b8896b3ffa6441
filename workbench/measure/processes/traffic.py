"""The requests of a fleet of processes: those of a round, and others of the same traffic to which step times are
fitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from workbench.engine.inputs import arrival
from workbench.errors import WorkbenchError
from workbench.experiment.build import clients_of, requests_of
from workbench.experiment.experiment import Experiment, PromptsWorkload, RandomWorkload
from workbench.measure.simulation import tokenizer_of
from workbench.memory.capacity import spec_and_dtype
from workbench.request import Request
from workbench.simulate.arrival import Arrival
from workbench.simulate.executor_settings import ProcessesExecutor
from workbench.simulate.traffic_settings import TrafficWorkload


@dataclass(frozen=True)
class FleetTraffic:
    """Requests with their times, in order."""

    requests: tuple[Request, ...]

    @property
    def arrivals(self) -> dict[str, Arrival]:
        """Return what a simulated fleet knows of each request, by id."""
        return {
            each.request_id: Arrival(
                arrival(each), len(each.prompt_ids), each.sampling.max_tokens, each.tenant, each.cache_salt,
                priority=each.priority, deadline=each.deadline, predicted_tokens=each.predicted_tokens,
            )
            for each in self.requests
        }  # fmt: skip

    def of_round(self, name: str) -> list[Request]:
        """Return the requests for one round, whose prompts no other round finds in a prefix cache."""
        return [replace(each, cache_salt=f"{each.cache_salt}/{name}") for each in self.requests]

    def at_once(self, most: int) -> FleetTraffic:
        """Return the first requests, all at second 0."""
        return FleetTraffic(tuple(replace(each, arrival=0.0) for each in self.requests[:most]))


def processes_executor_of(experiment: Experiment) -> ProcessesExecutor:
    """Return the executor of a variant of an experiment on processes (WorkbenchError for another)."""
    if not isinstance(experiment.executor, ProcessesExecutor):
        raise WorkbenchError(
            f"executor: kind {experiment.executor.kind} in one variant and processes in others; give all the same"
        )
    return experiment.executor


def measured_traffic(experiment: Experiment) -> FleetTraffic:
    """Return the requests that are measured (WorkbenchError for a workload that has none)."""
    if clients_of(experiment) is not None:
        raise WorkbenchError("workload.arrivals: closed_loop; a fleet of processes takes requests at given times")
    return FleetTraffic(_in_order(_requests(experiment)))


def calibration_traffic(experiment: Experiment, count: int) -> FleetTraffic:
    """Return `count` requests that are not measured: the next ones of a traffic, drawn anew of a random workload.

    A traffic without more, and given prompts, have no others: then they are the first of those that are measured."""
    work = experiment.workload
    if isinstance(work, RandomWorkload):
        other = work.model_copy(update={"seed": work.seed + 1, "requests": count})
        return FleetTraffic(_in_order(_requests(experiment.model_copy(update={"workload": other}))))
    if isinstance(work, TrafficWorkload) and work.requests is not None:
        longer = work.model_copy(update={"requests": work.requests + count})
        found = _in_order(_requests(experiment.model_copy(update={"workload": longer})))[work.requests :]
        if len(found) == count:
            return FleetTraffic(tuple(replace(each, arrival=arrival(each) - arrival(found[0])) for each in found))
    return FleetTraffic(measured_traffic(experiment).requests[:count])


def _requests(experiment: Experiment) -> list[Request]:
    if not isinstance(experiment.workload, TrafficWorkload | RandomWorkload | PromptsWorkload):
        kind = experiment.workload.kind
        raise WorkbenchError(
            f"workload: kind {kind} is measured on one engine; processes serve traffic, random, prompts"
        )
    return requests_of(experiment, tokenizer_of(experiment), spec_and_dtype(experiment)[0].vocab_size)


def _in_order(requests: Sequence[Request]) -> tuple[Request, ...]:
    return tuple(sorted(requests, key=arrival))
