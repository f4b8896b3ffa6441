"""Simulate from the command line: build an experiment from its arguments and return the metrics."""

from __future__ import annotations

import time
from typing import Any

from workbench.study.experiment import Experiment
from workbench.study.simulated import describe_simulation, fleet_for, fleet_metrics

SCHEDULER_DEFAULTS = {"max_num_seqs": 256, "max_num_batched_tokens": 2048}  # of a server, not of this machine


def simulation_experiment(
    model: str,
    executor: dict[str, Any],
    workload: dict[str, Any],
    slo: dict[str, float],
    prefix: bool = False,
    changes: tuple[str, ...] = (),
) -> Experiment:
    """Build an experiment from command line arguments; `changes` are those of `workbench run --set`."""
    plain = Experiment.from_values(
        {
            "question": "How would this traffic be served?",
            "model": {"name": model},
            "cache": {"prefix": "radix" if prefix else "off"},
            "schedule": SCHEDULER_DEFAULTS,
            "workload": workload,
            "executor": executor,
            "measure": {"slo": slo},
        },
        "simulate",
    )
    return plain.with_(*changes) if changes else plain


def simulate_experiment(experiment: Experiment, until: float | None = None) -> dict[str, Any]:
    """Simulate an experiment up to second `until` and return its metrics and a description."""
    began = time.perf_counter()
    fleet = fleet_for(experiment).run(until)
    return {**fleet_metrics(fleet, experiment.measure.slo, began), "about": describe_simulation(experiment)}
