"""Export a run to MLflow: settings, numbers, files. Needs the extra `mlflow`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError, installed_by
from workbench.files import read_yaml
from workbench.reports.run_report import environment_rows, read_question
from workbench.reports.sweep_report import is_sweep, read_sweep
from workbench.runs.record import Record

DEFAULT_EXPERIMENT = "inference-workbench"
MAX_VALUE_CHARACTERS = 6000  # length of a parameter's value that MLflow stores; a tag may have 8,000 characters
MAX_VALUES_PER_CALL = 100  # parameters in one call; MLflow allows 1,000 metrics
FORBIDDEN_CHARACTERS = re.compile(r"[^\w\-./: ]")


@dataclass(frozen=True)
class MLflowRun:
    """An exported run: its name here, its MLflow id, and the numbers of exported values and files."""

    run: str
    run_id: str
    parameters: int
    metrics: int
    artifacts: int


def export_to_mlflow(folder: Path | str, uri: str, experiment: str = DEFAULT_EXPERIMENT) -> list[MLflowRun]:
    """Export the run in `folder`, or each run of a sweep, to MLflow.

    Settings become parameters named by their paths, numbers of the summary become metrics, files become artifacts, and
    the environment becomes tags.

    Args:
        folder: a run folder or a sweep's folder.
        uri: `file:FOLDER` or a server's address; `sqlite:///FILE` needs the full `mlflow` package.
        experiment: name of the MLflow experiment, created if it does not exist.

    Raises:
        WorkbenchError: MLflow is not installed, or reports an error.
    """
    client = _client(uri)
    folder = Path(folder)
    if is_sweep(folder):
        sweep = read_sweep(folder)
        records = [(point.label, point.record, {"sweep": sweep.name}) for point in sweep.points if point.record]
    else:
        records = [(folder.resolve().name, Record.open(folder), {})]
    for _, record, _ in records:
        record.verify()
    try:
        known = client.get_experiment_by_name(experiment)
        place = known.experiment_id if known is not None else client.create_experiment(experiment)
        return [_export_run(client, place, name, record, tags) for name, record, tags in records]
    except Exception as error:  # errors of MLflow and of the store at the address
        raise WorkbenchError(f"export to {uri}: {type(error).__name__}: {str(error).splitlines()[0]}") from error


def _client(uri: str) -> Any:
    with installed_by("mlflow", "export"):
        from mlflow import MlflowClient
    if uri.startswith("file:"):  # MLflow asks for this variable before it writes to a folder
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    try:
        return MlflowClient(tracking_uri=uri, registry_uri=uri)
    except Exception as error:
        raise WorkbenchError(f"export to {uri}: {type(error).__name__}: {str(error).splitlines()[0]}") from error


def _export_run(client: Any, place: str, name: str, record: Record, more: Mapping[str, str]) -> MLflowRun:
    from mlflow.entities import Metric, Param

    summary, environment = record.summary, record.environment
    moment = _milliseconds(environment.get("date"))
    parameters = [Param(_name(key), value[:MAX_VALUE_CHARACTERS]) for key, value in iterate_settings(record)]
    metrics = [Metric(_name(key), float(value), moment, 0) for key, value in iterate_numbers(summary)]
    tags = {"question": read_question(record.experiment_text), "record": record.name, **more}
    tags |= {_name(key): value for key, value in environment_rows(environment, summary)}
    tags |= {_name(f"verdict.{each['claim']}"): each["outcome"] for each in summary.get("verdicts") or ()}
    run = client.create_run(
        place, start_time=moment, run_name=name, tags={k: v[:MAX_VALUE_CHARACTERS] for k, v in tags.items()}
    )
    run_id = run.info.run_id
    for first in range(0, len(parameters), MAX_VALUES_PER_CALL):
        client.log_batch(run_id, params=parameters[first : first + MAX_VALUES_PER_CALL])
    for first in range(0, len(metrics), MAX_VALUES_PER_CALL):
        client.log_batch(run_id, metrics=metrics[first : first + MAX_VALUES_PER_CALL])
    files = [path for path in sorted(record.path.iterdir()) if path.is_file() and not path.name.startswith(".")]
    for path in files:
        client.log_artifact(run_id, str(path))
    wall = summary.get("wall_s") or 0.0
    client.set_terminated(run_id, "FINISHED", end_time=moment + int(1000 * wall))
    return MLflowRun(record.name, run_id, len(parameters), len(metrics), len(files))


def iterate_settings(record: Record) -> Iterator[tuple[str, str]]:
    """Yield (dotted path, value) of every setting of the resolved experiment."""
    for path, value in _leaves(read_yaml(record.experiment_text, f"run {record.path}: experiment.yaml")):
        yield path, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def iterate_numbers(summary: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield (dotted path, value) of every number of the summary. Paths of a variant's numbers have its name in place of
    `rows`.
    """
    rows = summary.get("rows") or ()
    named = {str(row.get("variant", place)): row for place, row in enumerate(rows)}
    whole = {name: value for name, value in summary.items() if name not in ("rows", "verdicts")}
    for path, value in _leaves(whole | named):
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield path, value


def _leaves(value: Any, front: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{front}.{name}" if front else str(name))
    else:
        yield front, value


def _name(text: str) -> str:
    """Replace characters that MLflow does not allow in names (allowed: letters, digits, - _ . / : and spaces; 250 at
    most).
    """
    return FORBIDDEN_CHARACTERS.sub("_", text)[:250].strip("/. ") or "_"


def _milliseconds(date: str | None) -> int:
    from datetime import datetime

    try:
        return int(1000 * datetime.fromisoformat(date or "").timestamp())
    except ValueError:
        return 0
