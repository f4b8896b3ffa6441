"""Collect the contents of a run's report as plain values. The template decides how they look."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup
from pydantic import BaseModel

from workbench.display import Table
from workbench.errors import WorkbenchError
from workbench.experiment.experiment import Experiment
from workbench.reports import variants_table as comparison_text
from workbench.reports.run_charts import ReportChart, run_charts
from workbench.reports.run_tables import Remark, run_remarks, run_tables
from workbench.runs.record import Record
from workbench.trace.recorder import row_name
from workbench.units import format_bytes, format_percent

MAX_REQUESTS_LISTED = 100  # number of requests listed
MAX_OUTPUT_CHARACTERS = 2000  # number of characters shown of an output
NO_PREDICTION = "None was recorded with this run."


@dataclass(frozen=True)
class RunReport:
    """The contents of a run's report, in reading order."""

    name: str
    question: str
    changed: tuple[tuple[str, str], ...]  # (path, value) of each setting that differs from its default
    experiment: str  # as YAML
    prediction: tuple[str, ...]
    verdicts: tuple[Mapping[str, str], ...]
    pictures: tuple[ReportChart, ...]
    tables: tuple[Table, ...]
    remarks: tuple[Remark, ...]
    outputs: Table
    requests: int
    environment: tuple[tuple[str, str], ...]
    commands: tuple[tuple[str, str], ...]


def build_run_report(record: Record, draw: bool = True) -> RunReport:
    summary = record.summary
    compares = "rows" in summary
    tables, remarks = _comparison(summary) if compares else (tuple(run_tables(summary)), tuple(run_remarks(summary)))
    requests = [] if compares else record.requests.to_pylist()
    return RunReport(
        record.name,
        read_question(record.experiment_text),
        changed_settings(record.experiment_text),
        record.experiment_text,
        tuple(predictions(summary)),
        tuple(summary.get("verdicts") or ()),
        tuple(run_charts(record)) if draw else (),
        tables,
        remarks,
        _outputs(requests),
        len(requests),
        environment_rows(record.environment, summary),
        _commands(record, compares),
    )


def _comparison(summary: Mapping[str, Any]) -> tuple[tuple[Table, ...], tuple[Remark, ...]]:
    busy = summary.get("others_cpu_share") or 0.0
    remarks = (Remark(line, "do not trust" in line and busy > 0) for line in comparison_text.remarks(summary))
    return tuple(comparison_text.variant_tables(summary["rows"])), tuple(remarks)


def read_question(experiment: str) -> str:
    try:
        return Experiment.from_record(experiment).question
    except WorkbenchError:
        return next((line[9:].strip() for line in experiment.splitlines() if line.startswith("question:")), "")


def changed_settings(experiment: str) -> tuple[tuple[str, str], ...]:
    """Return the settings that differ from their defaults, as (path, value).

    Returns nothing for an experiment with settings unknown to this version; the YAML in the report has all settings.
    """
    try:
        part = Experiment.from_record(experiment)
    except WorkbenchError:
        return ()
    return tuple((path, format_value(value)) for path, value in _changed(part) if path != "question")


def _changed(part: BaseModel, front: str = "") -> Iterator[tuple[str, Any]]:
    for name, field in type(part).model_fields.items():
        value, path = getattr(part, name), f"{front}{name}"
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        if isinstance(value, BaseModel):
            if type(value) is not type(default) and "kind" in type(value).model_fields:
                yield f"{path}.kind", getattr(value, "kind")  # noqa: B009 (only some have one)
            yield from ((inner, each) for inner, each in _changed(value, f"{path}.") if inner != f"{path}.kind")
        elif field.is_required() or value != default:
            yield path, part.model_dump(mode="json")[name]
    yield from ((f"{front}{name}", value) for name, value in (part.model_extra or {}).items())  # a user's workload


def format_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def predictions(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line of text for each prediction made before the run: the record's own predictions, and the roofline's
    seconds beside the measured seconds.
    """
    prediction = summary.get("prediction")
    if isinstance(prediction, Mapping):
        yield from (f"{name}: {format_value(value)}" for name, value in prediction.items())
    elif prediction:
        yield from (prediction if isinstance(prediction, list) else [str(prediction)])
    roof = summary.get("roofline") or {}
    for name in ("prefill", "decode"):
        if name in roof:
            row = roof[name]
            yield (
                f"{name}: {row['predicted_s']:.4g} s is the lower bound by the cost model and this machine's ceilings; "
                f"{row['measured_s']:.4g} s were measured ({format_percent(row['share_of_roofline'])} of the roofline)"
            )
    for row in summary.get("rows") or ():
        predicted = [f"{key.removeprefix('predicted_').replace('_', ' ')} {value:.3g}" for key, value in row.items()
                 if key.startswith("predicted_") and isinstance(value, int | float)]  # fmt: skip
        if predicted:
            yield f"{row.get('variant', '')}: {', '.join(predicted)}"


def _outputs(requests: Sequence[dict[str, Any]]) -> Table:
    rows = []
    for row in requests[:MAX_REQUESTS_LISTED]:
        output = Markup('<div class="text">{}</div>').format((row["output_text"] or "")[:MAX_OUTPUT_CHARACTERS])
        error = row["error"] and Markup('<span class="serious">{}</span>').format(row["error"])
        rows.append((row_name(row), row["output_tokens"], row["finish_reason"] or "unfinished", error or output))
    return Table("", rows, ("request", "tokens", "ended by", "output"))


def environment_rows(environment: Mapping[str, Any], summary: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return the run's machine, versions and contention as (name, value)."""
    cpu = environment.get("cpu") or {}
    memory = environment.get("memory_bytes")
    commit = environment.get("commit") or {}
    busy, load = summary.get("others_cpu_share"), environment.get("load_average")
    packages = environment.get("packages") or {}
    threads = environment.get("threads") or {}
    backend = environment.get("backend") or {}
    rows = {
        "date": environment.get("date"),
        "processor": f"{cpu.get('model')}, {cpu.get('usable_cores')} cores, {' '.join(cpu.get('flags') or ())}"
        if cpu else None,
        "memory": format_bytes(memory) if memory else None,
        "accelerator": ", ".join(environment.get("gpu") or ()) or "none",
        "system": environment.get("platform"),
        "python": f"{environment.get('implementation', '')} {environment.get('python', '')}".strip(),
        "packages": ", ".join(f"{name} {version}" for name, version in packages.items() if version),
        "threads": ", ".join(f"{name} {value}" for name, value in threads.items() if value is not None),
        "compiler": environment.get("compiler"),
        "backend": f"{backend.get('name')} ({backend.get('reason')})" if backend else None,
        "commit": str(commit.get("hash", "")) + (", with changes" if commit.get("dirty") else "") if commit else None,
        "load before": ", ".join(f"{value:.2f}" for value in load) if load else None,
        "other processes": f"{format_percent(busy)} of the processor while it ran" if busy is not None else None,
    }  # fmt: skip
    return tuple((name, str(value)) for name, value in rows.items() if value)


def _commands(record: Record, compares: bool) -> tuple[tuple[str, str], ...]:
    anew = ("workbench run experiment.yaml", "after saving the YAML of this page as experiment.yaml")
    if compares:
        return (anew,)
    replay = ()
    if "inputs.parquet" in record.manifest:
        again = f"workbench reproduce {record.name} --replay"
        replay = ((again, "forms every step as it was recorded, whatever the clock says"),)
    return ((f"workbench reproduce {record.name}", "run in the parent folder; reports differences"), *replay, anew)
