"""Variants under simulated time: each as it is, and at every value of a swept setting."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from workbench.fleet.fleet import Fleet
from workbench.fleet.work import TICKS_PER_SECOND
from workbench.stages import StageCounter
from workbench.study.experiment import Experiment
from workbench.study.findings import VariantResults
from workbench.study.metrics import percentile
from workbench.study.simulated import fleet_for, request_metrics_of, fleet_metrics
from workbench.study.simulated_run import tokenizer_of
from workbench.study.variants import every_variant, settings_text

SHORT_PROMPT_TOKENS = 2048  # tokens of a prompt up to which it is short
SPREADS = ("ttft_s", "tpot_s", "longest_gap_s", "e2el_s", "queue_s")


def measure_simulated_variants(experiment: Experiment, on_progress: Callable[[str], None]) -> VariantResults:
    """Simulate every variant and return one row each, with a `curve` where one setting is swept."""
    variants = every_variant(experiment)
    path, values = (experiment.sweep and experiment.sweep.one_axis) or ("", ())
    on_progress = StageCounter(on_progress, len(variants) * (1 + len(values)))
    points = {  # all are built before the first is run: a wrong one is reported at once
        name: [variant.single({path: value}, "sweep") for value in values] for name, variant in variants.items()
    }
    rows, requests = [], []
    for name, variant in variants.items():
        on_progress(name)
        fleet, figures = _simulate_variant(variant)
        row = {"variant": name, "settings": settings_text(experiment, name), **figures}
        requests += [{"variant": name, **request_metrics_of(job)} for job in fleet.jobs]
        if values:
            row["curve"] = []
            for value, point in zip(values, points[name], strict=True):
                on_progress(f"{name}: {path}={value}")
                found = figures if point == variant else _simulate_variant(point)[1]
                row["curve"].append({"path": path, "value": value, **found})
        rows.append(row)
    return VariantResults(rows, {"requests": rows[0]["submitted"]}, {"requests": requests})


def _simulate_variant(experiment: Experiment) -> tuple[Fleet, dict[str, Any]]:
    began = time.perf_counter()
    fleet = fleet_for(experiment, tokenizer=tokenizer_of(experiment)).run()
    return fleet, _row(fleet, fleet_metrics(fleet, experiment.measure.slo, began))


def _row(fleet: Fleet, found: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten the metrics of a fleet into one row."""
    steps = sum(each["steps"] for each in found["instances"])
    rows = sum(instance.counters.sequence_steps for instance in fleet.instances)
    last = max((job.arrival.time for job in fleet.jobs), default=0.0)
    short = [job.first_token - job.arrival_time for job in fleet.jobs if job.arrival.prompt_tokens <= SHORT_PROMPT_TOKENS and job.first_token]
    return {
        **{name: found["requests"][name] for name in ("submitted", "finished", "failed", "retries", "num_preemptions")},
        **{f"{name}_{q}": found[name][q] for name in SPREADS for q in ("p50", "p90", "p99", "max")},
        **{f"short_ttft_s_p{q}": percentile((ticks / TICKS_PER_SECOND for ticks in short), q) for q in (50, 99)},
        "offered_requests_per_s": fleet.submitted / last if last else None,
        "slo_attainment": found["goodput"]["share"],
        "goodput_requests_per_s": found["goodput"]["requests_per_s"],
        "output_tokens_per_s": found["output_tokens_per_s"],
        "cache_hit_rate": found["cache_hit_rate"],
        "cache_waste": found["cache_waste"],
        "sequences_mean": rows / steps if steps else None,
        "simulated_s": found["simulated_s"],
    }
