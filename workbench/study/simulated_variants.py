"""Variants under simulated time: each as it is, and at every value of a swept setting."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from workbench.fleet.fleet import Fleet
from workbench.fleet.work import SECOND
from workbench.stages import Counted
from workbench.study.experiment import Experiment
from workbench.study.findings import Findings
from workbench.study.metrics import percentile
from workbench.study.simulated import fleet_for, job_figures, results
from workbench.study.simulated_run import tokenizer_of
from workbench.study.variants import every_variant, settings_text

SHORT = 2048  # tokens of a prompt up to which it is short
SPREADS = ("ttft_s", "tpot_s", "longest_gap_s", "e2el_s", "queue_s")


def simulated_variants(experiment: Experiment, tell: Callable[[str], None]) -> Findings:
    """Simulate every variant and return one row each, with a `curve` where one setting is swept."""
    variants = every_variant(experiment)
    path, values = (experiment.sweep and experiment.sweep.one_axis) or ("", ())
    tell = Counted(tell, len(variants) * (1 + len(values)))
    points = {  # all are built before the first is run: a wrong one is reported at once
        name: [variant.alone({path: value}, "sweep") for value in values] for name, variant in variants.items()
    }
    rows, requests = [], []
    for name, variant in variants.items():
        tell(name)
        fleet, figures = _simulated(variant)
        row = {"variant": name, "settings": settings_text(experiment, name), **figures}
        requests += [{"variant": name, **job_figures(job)} for job in fleet.jobs]
        if values:
            row["curve"] = []
            for value, point in zip(values, points[name], strict=True):
                tell(f"{name}: {path}={value}")
                found = figures if point == variant else _simulated(point)[1]
                row["curve"].append({"path": path, "value": value, **found})
        rows.append(row)
    return Findings(rows, {"requests": rows[0]["submitted"]}, {"requests": requests})


def _simulated(experiment: Experiment) -> tuple[Fleet, dict[str, Any]]:
    began = time.perf_counter()
    fleet = fleet_for(experiment, tokenizer=tokenizer_of(experiment)).run()
    return fleet, _row(fleet, results(fleet, experiment.measure.promise, began))


def _row(fleet: Fleet, found: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten the metrics of a fleet into one row."""
    steps = sum(each["steps"] for each in found["instances"])
    rows = sum(instance.tally.rows for instance in fleet.instances)
    last = max((job.arrival.time for job in fleet.jobs), default=0.0)
    short = [job.first_token - job.came for job in fleet.jobs if job.arrival.prompt_tokens <= SHORT and job.first_token]
    return {
        **{name: found["requests"][name] for name in ("submitted", "finished", "failed", "retries", "set_backs")},
        **{f"{name}_{q}": found[name][q] for name in SPREADS for q in ("p50", "p90", "p99", "max")},
        **{f"short_ttft_s_p{q}": percentile((ticks / SECOND for ticks in short), q) for q in (50, 99)},
        "offered_requests_per_s": fleet.submitted / last if last else None,
        "goodput_share": found["goodput"]["share"],
        "goodput_requests_per_s": found["goodput"]["requests_per_s"],
        "output_tokens_per_s": found["output_tokens_per_s"],
        "cache_hit_rate": found["cache_hit_rate"],
        "cache_waste": found["cache_waste"],
        "sequences_mean": rows / steps if steps else None,
        "simulated_s": found["simulated_s"],
    }
