"""Measure the variants of a fleet of processes in interleaved rounds, and compare predictions with measurements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from statistics import median
from typing import Any

from workbench.cluster.process_fleet import OpenFleet, ProcessFleet, open_fleet, wait_until_whole
from workbench.experiment.experiment import Experiment, Rows, VariantResults
from workbench.experiment.variants import every_variant, settings_text
from workbench.machine.ceilings import engine_threads
from workbench.machine.processor import cpu_times, others_cpu_share
from workbench.measure.jobs import job_metrics, job_row, jobs_of_events, served_seconds
from workbench.measure.processes.stream import serve_traffic
from workbench.measure.processes.traffic import FleetTraffic, measured_traffic, processes_executor_of
from workbench.progress import StageCounter
from workbench.runs.metrics import TABLES

WARMING = 8  # number of simultaneous requests that warm up a killed engine's successor before the next round
PREDICTED = (
    *(f"ttft_s_{q}" for q in ("p50", "p90", "p99")), *(f"tpot_s_{q}" for q in ("p50", "p90", "p99")),
    "longest_gap_s_p50", "longest_gap_s_p99", "slo_attainment", "goodput_requests_per_s", "output_tokens_per_s",
)  # fmt: skip


def measure_processes(
    experiment: Experiment,
    on_progress: Callable[[str], None],
    predicted: Mapping[str, Any] | None = None,
    open_fleet: OpenFleet = open_fleet,
) -> VariantResults:
    """Serve the requests with every variant's fleet in turn. Return one row per variant: medians over rounds, with
    `prediction` and `measured_over_predicted` for each measure.

    All fleets stay open; while one is measured, the others are idle."""
    variants = every_variant(experiment)
    rounds, warmup = experiment.measure.rounds, experiment.measure.warmup
    on_progress = StageCounter(on_progress, len(variants) * (1 + warmup + rounds))
    traffics = {name: measured_traffic(variant) for name, variant in variants.items()}
    tables: dict[str, Rows] = {"rounds": [], **{table: [] for table in TABLES}}
    with ExitStack() as closing:
        fleets: dict[str, ProcessFleet] = {}
        for name, variant in variants.items():
            on_progress(f"starting: {name}")
            executor = processes_executor_of(variant)
            threads = engine_threads(variant.measure.threads, executor.num_engines)
            fleets[name] = open_fleet(variant.engine, executor, threads)
            closing.callback(fleets[name].close)
        for turn in range(-warmup, rounds):
            for name, variant in variants.items():
                on_progress(f"round {turn + 1}: {name}" if turn >= 0 else f"warm-up: {name}")
                found = _serve_round(fleets[name], variant, traffics[name], turn)
                if turn >= 0:
                    for table, its in found.items():
                        tables[table] += [{"variant": name, "round": turn + 1, **row} for row in its]
    rows = []
    for name in variants:
        mine = [row for row in tables["rounds"] if row["variant"] == name]
        marks = {"variant": name, "settings": settings_text(experiment, name)}
        rows.append(marks | _medians(mine) | beside(_medians(mine), predicted and predicted["variants"].get(name)))
    about = {"requests": {name: len(each.requests) for name, each in traffics.items()}, "rounds": rounds}
    shares = [row["others_cpu_share"] for row in tables["rounds"] if row["others_cpu_share"] is not None]
    return VariantResults(rows, about | _calibrations(predicted), tables, median(shares) if shares else None)


def beside(measured: Mapping[str, Any], predicted: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the prediction of a row, and each measured value divided by its predicted value; empty without a
    prediction."""
    if predicted is None:
        return {}
    mine = {key: predicted[key] for key in PREDICTED if predicted.get(key) is not None}
    ratios = {key: measured[key] / its for key, its in mine.items() if measured.get(key) is not None and its}
    return {"prediction": mine, "measured_over_predicted": ratios}


def _serve_round(fleet: ProcessFleet, variant: Experiment, traffic: FleetTraffic, turn: int) -> dict[str, Rows]:
    """Run one round, with its kills unless it is a warm-up round; return its rows by table."""
    if not fleet.is_whole:
        wait_until_whole(fleet)
        serve_traffic(fleet, traffic.at_once(WARMING).of_round(f"successor {turn}"))
    kills = processes_executor_of(variant).failures if turn >= 0 else ()
    before = cpu_times()
    served = serve_traffic(fleet, traffic.of_round(f"round {turn}"), kills)
    others = others_cpu_share(before)
    jobs = jobs_of_events(traffic.arrivals, served.events, served.began)
    seconds = served_seconds(jobs)
    row = job_row(jobs, job_metrics(jobs, variant.measure.slo, seconds))
    recorder = served.recorded()
    return {"rounds": [row | {"seconds": seconds, "others_cpu_share": others}]} | {
        table: getattr(recorder, table)() for table in TABLES
    }


def _medians(rows: Rows) -> dict[str, Any]:
    names = [name for name in rows[0] if name not in ("variant", "round")]
    known = {name: [row[name] for row in rows if row[name] is not None] for name in names}
    return {name: median(values) if values else None for name, values in known.items()}


def _calibrations(predicted: Mapping[str, Any] | None) -> dict[str, Any]:
    return {} if predicted is None else {key: predicted[key] for key in ("predicted_at", "calibrations")}
