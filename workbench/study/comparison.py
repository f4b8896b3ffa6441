"""Compare the variants of an experiment: one table, charts and verdicts in a run folder."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError
from workbench.fleet.settings import SimulatedExecutor
from workbench.stages import stages
from workbench.study import company_chart, curves, latency_chart, lengths_chart, pareto, speculation_chart, texts_chart
from workbench.study.company import company
from workbench.study.company_workload import CompanyWorkload
from workbench.study.environment import environment
from workbench.study.experiment import Experiment
from workbench.study.findings import Findings
from workbench.study.interruption import interruption
from workbench.study.interruption_workload import InterruptionWorkload
from workbench.study.lengths import lengths
from workbench.study.lengths_workload import LengthsWorkload
from workbench.study.machine import cpu_times, others_cpu_share
from workbench.study.predicted import Predictions, predictions
from workbench.study.quality import quality
from workbench.study.quality_workload import QualityWorkload, SharedPrefixWorkload
from workbench.study.record import Record, RunFolder
from workbench.study.run import threads
from workbench.study.run_folder import writing
from workbench.study.shared_prefix import shared_prefix
from workbench.study.side_by_side import side_by_side
from workbench.study.simulated_variants import simulated_variants
from workbench.study.speculating import speculating
from workbench.study.speculation_workload import SpeculationWorkload
from workbench.study.streaming import streaming
from workbench.study.streaming_workload import StreamingWorkload
from workbench.study.texts import sampled_texts
from workbench.study.texts_workload import TextsWorkload
from workbench.study.verdict import verdicts
from workbench.user_parts import find


def run_comparison(
    experiment: Experiment, out: Path | str = "runs", name: str = "run", progress: bool = True
) -> Record:
    """Measure every variant and write a run folder below `out`. A mistake in the experiment leaves no folder."""
    if experiment.judge is not None:
        find(experiment.judge.path)  # checked before anything is measured
    with writing(out, name) as folder:
        return _measured(experiment, folder, progress)


def _measured(experiment: Experiment, folder: RunFolder, progress: bool) -> Record:
    folder.write_text("experiment.yaml", experiment.to_yaml())
    folder.write_json("environment.json", environment())
    before, began = cpu_times(), time.perf_counter()
    try:
        with threads(experiment.measure.threads), stages(progress) as tell:
            predicted = predictions(experiment, tell)
            if predicted is not None:
                folder.write_json("prediction.json", predicted)  # before anything is measured
            found = findings(experiment, tell, predicted)
    except WorkbenchError:
        shutil.rmtree(folder.path, ignore_errors=True)
        raise
    summary = {
        "rows": found.rows,
        "about": found.about,
        "wall_s": time.perf_counter() - began,
        "others_cpu_share": others_cpu_share(before),
    }
    folder.write_json("summary.json", summary)  # what was measured stays, should judging or drawing it fail
    for table, rows in found.tables.items():
        if rows:
            folder.write_table(f"{table}.parquet", rows)
    summary["verdicts"] = [each.as_dict() for each in verdicts(experiment.judge, found.rows)]
    summary["picture"] = _draw(folder, experiment, found)
    folder.write_json("summary.json", summary)
    return Record.open(folder.finish())


def findings(
    experiment: Experiment,
    tell: Callable[[str], None] = lambda line: None,
    predicted: Predictions | None = None,
) -> Findings:
    """Measure the variants by the kind of workload. `predicted` is the result of `predict_variants`, computed here if
    needed."""
    sweep, simulated = experiment.sweep, isinstance(experiment.executor, SimulatedExecutor)
    if sweep is not None and not (simulated and sweep.one_axis):
        raise WorkbenchError(
            "sweep: has points of its own, which `workbench sweep` runs; take it out here, or give a simulated "
            "experiment one axis, which is drawn as a curve"
        )
    if isinstance(experiment.workload, LengthsWorkload):
        return lengths(experiment, tell, predicted or predictions(experiment, tell) or {})
    if isinstance(experiment.workload, TextsWorkload):
        return sampled_texts(experiment, tell, predicted or predictions(experiment, tell) or {})
    if isinstance(experiment.workload, QualityWorkload):
        return quality(experiment, tell, predicted)
    if isinstance(experiment.workload, SharedPrefixWorkload):
        return shared_prefix(experiment, tell)
    if isinstance(experiment.workload, CompanyWorkload):
        return company(experiment, tell)
    if isinstance(experiment.workload, SpeculationWorkload):
        return speculating(experiment, tell)
    if isinstance(experiment.workload, InterruptionWorkload):
        return interruption(experiment, tell)
    if isinstance(experiment.workload, StreamingWorkload):
        return streaming(experiment, tell)
    if simulated:
        return simulated_variants(experiment, tell)
    return side_by_side(experiment, tell, predicted)


def picture_of(experiment: Experiment, rows: Sequence[Mapping[str, Any]]) -> tuple[str, Any]:
    """Return the name of the chart for this kind of run, and the module that draws it: `svg` and `png` of rows and a
    title."""
    if isinstance(experiment.workload, QualityWorkload):
        return "pareto", pareto
    if isinstance(experiment.workload, CompanyWorkload):
        return "company", company_chart
    if isinstance(experiment.workload, SpeculationWorkload):
        return "speculation", speculation_chart
    if isinstance(experiment.workload, LengthsWorkload):
        return "lengths", lengths_chart
    if isinstance(experiment.workload, TextsWorkload):
        return "texts", texts_chart
    if all("predicted" in row and "curve" not in row for row in rows):
        return "latency", latency_chart
    return "curves", curves


def _draw(folder: RunFolder, experiment: Experiment, found: Findings) -> dict[str, Any] | None:
    """Write the chart as SVG and PNG, and return the files' names, or the reason why there is none."""
    name, picture = picture_of(experiment, found.rows)
    if problem := pareto.plotting_problem():
        return {"problem": problem}
    folder.write_text(f"{name}.svg", picture.svg(found.rows, experiment.question))
    folder.write_bytes(f"{name}.png", picture.png(found.rows, experiment.question))
    return {"svg": f"{name}.svg", "png": f"{name}.png"}
