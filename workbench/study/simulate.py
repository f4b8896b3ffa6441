"""`workbench simulate`: from the command line's words to an experiment, and what came of it."""

from __future__ import annotations

import time
from typing import Any

from workbench.study.experiment import Experiment
from workbench.study.simulated import about, fleet_for, results

SCHEDULE = {"max_num_seqs": 256, "max_num_batched_tokens": 2048}  # of a server's accelerator, not of this machine


def experiment_of(
    model: str,
    executor: dict[str, Any],
    workload: dict[str, Any],
    promise: dict[str, float],
    prefix: bool = False,
    changes: tuple[str, ...] = (),
) -> Experiment:
    """The experiment that the words describe; `changes` as `--set` of `workbench run`."""
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
    """`results` of its fleet up to second `until`, and what was simulated."""
    began = time.perf_counter()
    fleet = fleet_for(experiment).run(until)
    return {**results(fleet, experiment.measure.promise, began), "about": about(experiment)}
