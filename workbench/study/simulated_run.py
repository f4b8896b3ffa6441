"""Run a simulated experiment: the files of a real run, from events at simulated times."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

from workbench.engine.load import SHIPPED
from workbench.errors import WorkbenchError
from workbench.fleet.fleet import Fleet
from workbench.prompt.tokenizer import Tokenizer
from workbench.study.environment import environment
from workbench.study.experiment import Experiment
from workbench.study.goodput import recorded_goodput
from workbench.study.metrics import summarize
from workbench.study.record import Record, RunFolder
from workbench.study.run_folder import writing
from workbench.study.simulated import about, fleet_for, job_figures, results
from workbench.study.simulated_machine import sizes_of
from workbench.trace.perfetto import chrome_trace
from workbench.trace.recorder import Recorder

LANE = "simulated"


def run_simulated(experiment: Experiment, out: Path | str = "runs", name: str = "run") -> Record:
    """Simulate `experiment` and write its folder below `out`. No model runs, so there is no warm-up."""
    with writing(out, name) as folder:
        return _simulated(experiment, folder)


def _simulated(experiment: Experiment, folder: RunFolder) -> Record:
    folder.write_text("experiment.yaml", experiment.to_yaml())
    began, recorder = time.perf_counter(), Recorder()
    try:
        fleet = fleet_for(experiment, recorder.note, tokenizer_of(experiment)).run()
        told = about(experiment)
    except WorkbenchError:
        shutil.rmtree(folder.path, ignore_errors=True)
        raise
    reason = told["step_times"]
    folder.write_json("environment.json", {**environment(), "lane": {"name": LANE, "reason": reason}})
    summary = summarize(recorder.requests(), recorder.steps(), recorder.tokens())
    summary |= {
        "goodput": recorded_goodput(recorder, experiment.measure.promise, summary["wall_s"]),
        "lane": {"name": LANE, "reason": reason},
        "artifacts": {},
        "others_cpu_share": None,
        "model": {"name": told["model"], "weight_bytes": sizes_of(experiment).weight_bytes},
        "kv": _cache_figures(fleet, told, summary),
        "simulated": {**results(fleet, experiment.measure.promise, began), "about": told},
    }
    for table in ("requests", "steps", "tokens", "decisions"):
        folder.write_table(f"{table}.parquet", getattr(recorder, table)())
    folder.write_table("jobs.parquet", [job_figures(job) for job in fleet.jobs])
    folder.write_json("trace.json", {**chrome_trace(recorder), "otherData": {"lane": LANE}}, indent=None)
    folder.write_json("summary.json", summary)
    return Record.open(folder.finish())


def tokenizer_of(experiment: Experiment) -> Tokenizer | None:
    """Return the tokenizer of the model's folder; None for a named shape."""
    folder = SHIPPED.get(experiment.model.name, Path(experiment.model.name))
    return Tokenizer.from_folder(folder) if folder.is_dir() else None


def _cache_figures(fleet: Fleet, told: dict[str, Any], summary: dict[str, Any]) -> dict[str, Any]:
    pages = sum(sum(instance.machine.pages) for instance in fleet.instances)
    size = sum(
        count * each
        for instance in fleet.instances
        for count, each in zip(instance.machine.pages, instance.machine.page_bytes, strict=True)
    )
    return {
        "page_size": told["page_size"],
        "pages": pages,
        "pages_used_peak": summary["pages_used_peak"],
        "bytes_per_token_formula": round(told["kv_bytes_per_token"]),
        "bytes_used_peak": summary["kv_bytes_peak"],
        "bytes_allocated": size,
        "bytes_allocated_formula": size,
    }
