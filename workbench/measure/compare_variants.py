"""Compare the variants of an experiment: one table, charts and verdicts in a run folder."""

from __future__ import annotations

import fnmatch
import shutil
import time
from pathlib import Path

from workbench.custom import workload_code
from workbench.errors import WorkbenchError, nearest
from workbench.experiment.experiment import Experiment, Predictions, ProgressCallback, VariantResults
from workbench.experiment.verdict import VariantRows, require_judge, verdicts
from workbench.figures.figure import Figure
from workbench.machine.ceilings import intra_op_threads
from workbench.machine.environment import environment
from workbench.machine.processor import cpu_times, others_cpu_share
from workbench.measure import simulation as curves
from workbench.measure.predictions import predict_variants
from workbench.measure.processes.rounds import measure_processes
from workbench.progress import progress_stages
from workbench.runs.compared_run import flatten
from workbench.runs.folder import RunFolder, writing
from workbench.runs.measures import own_measures_of
from workbench.runs.record import Record
from workbench.simulate.executor_settings import ProcessesExecutor, SimulatedExecutor


def run_comparison(
    experiment: Experiment, out: Path | str = "runs", name: str = "run", progress: bool = True
) -> Record:
    """Measure every variant and write a run folder below `out`. If the experiment has a mistake, no folder is left."""
    if experiment.judge is not None:
        require_judge(experiment.judge)  # before anything is measured
    with writing(out, name) as folder:
        return _measured(experiment, folder, progress)


def _measured(experiment: Experiment, folder: RunFolder, progress: bool) -> Record:
    folder.write_text("experiment.yaml", experiment.to_yaml())
    folder.write_json("environment.json", environment())
    before, began = cpu_times(), time.perf_counter()
    try:
        own = workload_code(experiment.workload, "must measure its variants")
        with own, intra_op_threads(experiment.measure.threads), progress_stages(progress) as tell:
            predicted = predict_variants(experiment, tell)
            if predicted is not None:
                folder.write_json("prediction.json", predicted)  # write predictions before anything is measured
            found = measure_variants(experiment, tell, predicted)
    except WorkbenchError:
        shutil.rmtree(folder.path, ignore_errors=True)
        raise
    summary = {
        "rows": found.rows,
        "about": found.metadata,
        "wall_s": time.perf_counter() - began,
        "others_cpu_share": others_cpu_share(before) if found.others_cpu_share is None else found.others_cpu_share,
    }
    folder.write_json("summary.json", summary)  # keep the measurements if judging or drawing fails
    for table, rows in found.tables.items():
        if rows:
            folder.write_table(f"{table}.parquet", rows)
    own_measures = own_measures_of(experiment.workload.measures)
    if own_measures:
        summary["measures"] = own_measures
    pictures = {"svg": "chart.svg", "png": "chart.png"}
    try:
        for measure in own_measures:
            _require_measure(experiment.workload.kind, str(measure["name"]), found.rows)
        summary["verdicts"] = [each.as_dict() for each in verdicts(experiment.judge, found.rows)]
        chart = draw_variants(experiment, found.rows)
        for form, name in pictures.items():
            folder.write_bytes(name, chart.render(form))
    except WorkbenchError as error:
        raise WorkbenchError(f"{error}; the measured rows are in {folder.path}/summary.json") from error
    folder.write_json("summary.json", summary | {"picture": pictures})
    return Record.open(folder.finish())


def _require_measure(kind: str, name: str, rows: VariantRows) -> None:
    """Raise WorkbenchError if no row has the measure `name` but one has a similar name; some settings have no value."""
    columns = list(dict.fromkeys(column for row in rows for column, _ in flatten(row, "_")))
    if not fnmatch.filter(columns, name) and (hint := nearest(name, columns)):
        raise WorkbenchError(f"workload {kind}: no row has its measure {name!r}{hint}")


def measure_variants(
    experiment: Experiment,
    on_progress: ProgressCallback = lambda line: None,
    predicted: Predictions | None = None,
) -> VariantResults:
    """Measure the variants by their workload. `predicted` is the result of `predict_variants`."""
    sweep = experiment.sweep
    if sweep is not None and not (isinstance(experiment.executor, SimulatedExecutor) and sweep.one_axis):
        raise WorkbenchError(
            "sweep: is run by `workbench sweep`; remove it from this experiment, or give a simulated "
            "experiment one axis only, to draw a curve"
        )
    if isinstance(experiment.executor, ProcessesExecutor):
        return measure_processes(experiment, on_progress, predicted)
    workload = experiment.workload
    if predicted is None and workload.is_predicted:
        predicted = workload.predict(experiment, on_progress)
    found = workload.measure(experiment, on_progress, predicted or {})
    with workload_code(workload, "measure must return VariantResults of rows with 'variant'"):
        _ = [row["variant"] for row in found.rows]
    return found


def draw_variants(experiment: Experiment, rows: VariantRows) -> Figure:
    """Draw the chart of an experiment's rows: its workload's own chart, or bars and curves."""
    with workload_code(experiment.workload, "chart must return a figure or None"):
        own = experiment.workload.chart(rows, experiment.question)
        _ = own is None or own.render
    return curves.chart(rows, experiment.question) if own is None else own
