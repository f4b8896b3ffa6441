"""Run a simulated experiment: the files of a real run, from events at simulated times."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

from workbench.engine.load import BUNDLED_MODELS
from workbench.errors import WorkbenchError
from workbench.fleet.fleet import Fleet
from workbench.prompt.tokenizer import Tokenizer
from workbench.study.environment import environment
from workbench.study.experiment import Experiment
from workbench.study.goodput import recorded_goodput
from workbench.study.metrics import summarize
from workbench.study.record import Record, RunFolder
from workbench.study.run_folder import writing
from workbench.study.simulated import describe_simulation, fleet_for, request_metrics_of, fleet_metrics
from workbench.study.simulated_machine import sizes_of
from workbench.trace.perfetto import chrome_trace
from workbench.trace.recorder import Recorder

SIMULATED_BACKEND = "simulated"


def run_simulated(experiment: Experiment, out: Path | str = "runs", name: str = "run") -> Record:
    """Simulate `experiment` and write its folder below `out`. No model runs, so there is no warm-up."""
    with writing(out, name) as folder:
        return _simulated(experiment, folder)


def _simulated(experiment: Experiment, folder: RunFolder) -> Record:
    folder.write_text("experiment.yaml", experiment.to_yaml())
    began, recorder = time.perf_counter(), Recorder()
    try:
        fleet = fleet_for(experiment, recorder.record, tokenizer_of(experiment)).run()
        told = describe_simulation(experiment)
    except WorkbenchError:
        shutil.rmtree(folder.path, ignore_errors=True)
        raise
    reason = told["step_times"]
    folder.write_json("environment.json", {**environment(), "backend": {"name": SIMULATED_BACKEND, "reason": reason}})
    summary = summarize(recorder.requests(), recorder.steps(), recorder.tokens())
    summary |= {
        "goodput": recorded_goodput(recorder, experiment.measure.slo, summary["wall_s"]),
        "backend": {"name": SIMULATED_BACKEND, "reason": reason},
        "artifacts": {},
        "others_cpu_share": None,
        "model": {"name": told["model"], "weight_bytes": sizes_of(experiment).weight_bytes},
        "kv": _cache_figures(fleet, told, summary),
        "simulated": {**fleet_metrics(fleet, experiment.measure.slo, began), "about": told},
    }
    for table in ("requests", "steps", "tokens", "decisions"):
        folder.write_table(f"{table}.parquet", getattr(recorder, table)())
    folder.write_table("jobs.parquet", [request_metrics_of(job) for job in fleet.jobs])
    folder.write_json("trace.json", {**chrome_trace(recorder), "otherData": {"backend": SIMULATED_BACKEND}}, indent=None)
    folder.write_json("summary.json", summary)
    return Record.open(folder.finish())


def tokenizer_of(experiment: Experiment) -> Tokenizer | None:
    """Return the tokenizer of the model's folder; None for a named shape."""
    folder = BUNDLED_MODELS.get(experiment.model.name, Path(experiment.model.name))
    return Tokenizer.from_folder(folder) if folder.is_dir() else None


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
