"""Simulate from the command line: build an experiment from its arguments and return the metrics."""

from __future__ import annotations

import time
from typing import Any

from workbench.study.experiment import Experiment
from workbench.study.simulated import about, fleet_for, results

SCHEDULE = {"max_num_seqs": 256, "max_num_batched_tokens": 2048}  # of a server, not of this machine


def experiment_of(
    model: str,
    executor: dict[str, Any],
    workload: dict[str, Any],
    promise: dict[str, float],
    prefix: bool = False,
    changes: tuple[str, ...] = (),
) -> Experiment:
    """Build an experiment from command line arguments; `changes` are those of `workbench run --set`."""
    plain = Experiment.of(
        {
            "question": "How would this traffic be served?",
            "model": {"name": model},
            "cache": {"prefix": "radix" if prefix else "off"},
            "schedule": SCHEDULE,
            "workload": workload,
            "executor": executor,
            "measure": {"promise": promise},
        },
        "simulate",
    )
    return plain.with_(*changes) if changes else plain


def simulate_experiment(experiment: Experiment, until: float | None = None) -> dict[str, Any]:
    """Simulate an experiment up to second `until` and return its metrics and a description."""
    began = time.perf_counter()
    fleet = fleet_for(experiment).run(until)
    return {**results(fleet, experiment.measure.promise, began), "about": about(experiment)}
