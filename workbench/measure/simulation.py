"""Run a simulated experiment: write the same files as a real run, simulate variants and swept settings, and draw their
chart."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from workbench.engine.loaded_model import model_folder
from workbench.errors import WorkbenchError
from workbench.experiment.experiment import Experiment, VariantResults
from workbench.experiment.variants import every_variant, settings_text
from workbench.experiment.verdict import VariantRows
from workbench.figures.bars import Bar, bars
from workbench.figures.figure import Figure, beside
from workbench.figures.lines import Series, lines
from workbench.machine.environment import environment
from workbench.measure.chart import axis_title
from workbench.measure.goodput import recorded_goodput
from workbench.measure.jobs import job_row, request_metrics_of
from workbench.measure.simulated import describe_simulation, fleet_for, fleet_metrics, sizes_of
from workbench.model.formats.texts import open_tokenizer
from workbench.progress import StageCounter
from workbench.prompt.tokenization.tokenizer import Tokenizer
from workbench.runs.folder import RunFolder, writing
from workbench.runs.measures import main_measures
from workbench.runs.metrics import summarize
from workbench.runs.record import Record
from workbench.simulate.fleet import Fleet
from workbench.svg import Axis
from workbench.trace.perfetto import chrome_trace
from workbench.trace.recorder import Recorder

SIMULATED_BACKEND = "simulated"
# defaults of a server rather than of this machine
SCHEDULER_DEFAULTS = {"max_num_seqs": 256, "max_num_batched_tokens": 2048}
CURVES = {  # whether the axis of each curve is logarithmic
    "slo_attainment": False,
    "ttft_s_p50": True,
    "ttft_s_p99": True,
    "longest_gap_s_p99": True,
    "cache_hit_rate": False,
}
BARS = (
    "cache_waste", "sequences_mean", "output_tokens_per_s", "longest_gap_s", "ttft_s", "behind_ttft_s",
    "visible_s_p50", "ttft_s_p50", "ttft_s_p99", "tpot_s_p50", "e2el_s_p50", "seconds",
)  # fmt: skip


def run_simulated(experiment: Experiment, out: Path | str = "runs", name: str = "run") -> Record:
    """Simulate `experiment` and write its folder below `out`. No model runs, so there is no warm-up."""
    with writing(out, name) as folder:
        return _simulated(experiment, folder)


def _simulated(experiment: Experiment, folder: RunFolder) -> Record:
    folder.write_text("experiment.yaml", experiment.to_yaml())
    began, recorder = time.perf_counter(), Recorder()
    try:
        fleet = fleet_for(experiment, recorder.record, tokenizer_of(experiment)).run()
        described = describe_simulation(experiment)
    except WorkbenchError:
        shutil.rmtree(folder.path, ignore_errors=True)
        raise
    reason = described["step_times"]
    folder.write_json("environment.json", {**environment(), "backend": {"name": SIMULATED_BACKEND, "reason": reason}})
    summary = summarize(recorder.requests(), recorder.steps(), recorder.tokens())
    summary |= {
        "goodput": recorded_goodput(recorder, experiment.measure.slo, summary["wall_s"]),
        "backend": {"name": SIMULATED_BACKEND, "reason": reason},
        "artifacts": {},
        "others_cpu_share": None,
        "model": {"name": described["model"], "weight_bytes": sizes_of(experiment).weight_bytes},
        "kv": _cache_figures(fleet, described, summary),
        "simulated": {**fleet_metrics(fleet, experiment.measure.slo, began), "about": described},
    }
    for table in ("requests", "steps", "tokens", "decisions"):
        folder.write_table(f"{table}.parquet", getattr(recorder, table)())
    folder.write_table("jobs.parquet", [request_metrics_of(job) for job in fleet.jobs])
    folder.write_json(
        "trace.json", {**chrome_trace(recorder), "otherData": {"backend": SIMULATED_BACKEND}}, indent=None
    )
    folder.write_json("summary.json", summary)
    return Record.open(folder.finish())


def tokenizer_of(experiment: Experiment) -> Tokenizer | None:
    """Return the tokenizer of the model's folder; None for a named shape."""
    place = model_folder(experiment.model.name)
    return None if place is None else open_tokenizer(place)


def _cache_figures(fleet: Fleet, simulation: dict[str, Any], summary: dict[str, Any]) -> dict[str, Any]:
    pages = sum(sum(instance.spec.pages) for instance in fleet.instances)
    size = sum(
        count * each
        for instance in fleet.instances
        for count, each in zip(instance.spec.pages, instance.spec.page_bytes, strict=True)
    )
    return {
        "page_size": simulation["page_size"],
        "pages": pages,
        "pages_used_peak": summary["pages_used_peak"],
        "bytes_per_token_formula": round(simulation["kv_bytes_per_token"]),
        "bytes_used_peak": summary["kv_bytes_peak"],
        "bytes_allocated": size,
        "bytes_allocated_formula": size,
    }


def simulation_experiment(
    model: str,
    executor: dict[str, Any],
    workload: dict[str, Any],
    slo: dict[str, float],
    prefix: bool = False,
    changes: tuple[str, ...] = (),
) -> Experiment:
    """Build an experiment from command line arguments; `changes` are overrides as in `workbench run --set`."""
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
    """Simulate an experiment up to second `until`, and return its metrics and a description of its instances."""
    began = time.perf_counter()
    fleet = fleet_for(experiment).run(until)
    return {**fleet_metrics(fleet, experiment.measure.slo, began), "about": describe_simulation(experiment)}


def measure_simulated_variants(experiment: Experiment, on_progress: Callable[[str], None]) -> VariantResults:
    """Simulate every variant and return one row each, with a `curve` if one setting is swept."""
    variants = every_variant(experiment)
    path, values = (experiment.sweep and experiment.sweep.one_axis) or ("", ())
    on_progress = StageCounter(on_progress, len(variants) * (1 + len(values)))
    points = {  # build all before the first runs, so that a wrong one is reported at once
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
    return job_row(fleet.jobs, found) | {
        **{name: found[name] for name in ("cache_hit_rate", "cache_waste", "simulated_s")},
        "sequences_mean": rows / steps if steps else None,
    }


def chart(rows: VariantRows, title: str) -> Figure:
    """Draw one panel for each metric of the rows, with a curve or bar for each variant."""
    return beside(_curves(rows) if any(row.get("curve") for row in rows) else _bars(rows), title)


def _curves(rows: VariantRows) -> list[Figure]:
    points = [point for row in rows for point in row["curve"]]
    offered = len({point.get("offered_requests_per_s") for point in points}) > 1
    field = "offered_requests_per_s" if offered else "value"
    named = any(not isinstance(point[field], int | float) for point in points)
    names = tuple(dict.fromkeys(str(point[field]) for point in points)) if named else ()
    x = Axis("requests offered a second" if offered else points[0]["path"], names=names)
    panels = []
    for key, log in CURVES.items():
        if len({point[key] for point in points if point.get(key)}) < 2:
            continue
        curves = [
            Series(
                row["variant"],
                tuple(
                    (float(names.index(str(each[field]))) if names else each[field], each[key])
                    for each in row["curve"]
                    if each.get(key)
                ),
            )
            for row in rows
        ]
        panels.append(lines(curves, x, Axis(axis_title(key), log), width=300, height=220, zero=not log))
    return panels


def _bars(rows: VariantRows) -> list[Figure]:
    usual = [key for key in BARS if any(row.get(key) is not None for row in rows)]
    known = {key: [Bar(row["variant"], row[key]) for row in rows if row.get(key) is not None]
             for key in usual or main_measures(rows)}  # fmt: skip
    return [bars(found, Axis(axis_title(key)), width=300) for key, found in known.items()]
