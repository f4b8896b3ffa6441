"""Compare the variants of an experiment: one table, charts and verdicts in a run folder."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.custom import resolve_path
from workbench.errors import WorkbenchError
from workbench.experiment.experiment import Experiment
from workbench.experiment.settings import (
    AgentWorkload,
    DeterminismWorkload,
    LengthsWorkload,
    PrefillInterferenceWorkload,
    QualityWorkload,
    SharedPrefixWorkload,
    SpeculationWorkload,
    StreamingWorkload,
    TextAgreementWorkload,
    TextsWorkload,
)
from workbench.experiment.variants import VariantResults
from workbench.experiment.verdict import verdicts
from workbench.machine.ceilings import intra_op_threads
from workbench.machine.environment import environment
from workbench.machine.processor import cpu_times, others_cpu_share
from workbench.measure import agent as agent_chart
from workbench.measure import chart as pareto
from workbench.measure import determinism as determinism_chart
from workbench.measure import lengths as lengths_chart
from workbench.measure import sampled_texts as texts_chart
from workbench.measure import serving as latency_chart
from workbench.measure import simulation as curves
from workbench.measure import speculation as speculation_chart
from workbench.measure import text_agreement as agreement_chart
from workbench.measure.agent import measure_agent
from workbench.measure.determinism import measure_determinism
from workbench.measure.lengths import measure_lengths
from workbench.measure.predictions import Predictions, predict_variants
from workbench.measure.prefill_interference import measure_prefill_interference
from workbench.measure.processes.rounds import measure_processes
from workbench.measure.quality.quality import measure_quality
from workbench.measure.sampled_texts import measure_sampled_texts
from workbench.measure.serving import measure_serving
from workbench.measure.shared_prefix import measure_shared_prefix
from workbench.measure.simulation import measure_simulated_variants
from workbench.measure.speculation import measure_speculation
from workbench.measure.streaming import measure_streaming
from workbench.measure.text_agreement import measure_text_agreement
from workbench.progress import progress_stages
from workbench.runs.folder import RunFolder, writing
from workbench.runs.record import Record
from workbench.simulate.executor_settings import ProcessesExecutor, SimulatedExecutor


def run_comparison(
    experiment: Experiment, out: Path | str = "runs", name: str = "run", progress: bool = True
) -> Record:
    """Measure every variant and write a run folder below `out`. A mistake in the experiment leaves no folder."""
    if experiment.judge is not None:
        resolve_path(experiment.judge.path)  # checked before anything is measured
    with writing(out, name) as folder:
        return _measured(experiment, folder, progress)


def _measured(experiment: Experiment, folder: RunFolder, progress: bool) -> Record:
    folder.write_text("experiment.yaml", experiment.to_yaml())
    folder.write_json("environment.json", environment())
    before, began = cpu_times(), time.perf_counter()
    try:
        with intra_op_threads(experiment.measure.threads), progress_stages(progress) as tell:
            predicted = predict_variants(experiment, tell)
            if predicted is not None:
                folder.write_json("prediction.json", predicted)  # before anything is measured
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
    folder.write_json("summary.json", summary)  # what was measured stays, should judging or drawing it fail
    for table, rows in found.tables.items():
        if rows:
            folder.write_table(f"{table}.parquet", rows)
    summary["verdicts"] = [each.as_dict() for each in verdicts(experiment.judge, found.rows)]
    summary["picture"] = _draw(folder, experiment, found)
    folder.write_json("summary.json", summary)
    return Record.open(folder.finish())


def measure_variants(
    experiment: Experiment,
    on_progress: Callable[[str], None] = lambda line: None,
    predicted: Predictions | None = None,
) -> VariantResults:
    """Measure the variants by the kind of workload. `predicted` is the result of `predict_variants`, computed here if
    needed."""
    sweep, simulated = experiment.sweep, isinstance(experiment.executor, SimulatedExecutor)
    if sweep is not None and not (simulated and sweep.one_axis):
        raise WorkbenchError(
            "sweep: has points of its own, which `workbench sweep` runs; take it out here, or give a simulated "
            "experiment one axis, which is drawn as a curve"
        )
    if isinstance(experiment.executor, ProcessesExecutor):
        return measure_processes(experiment, on_progress, predicted)
    if isinstance(experiment.workload, LengthsWorkload):
        return measure_lengths(experiment, on_progress, predicted or predict_variants(experiment, on_progress) or {})
    if isinstance(experiment.workload, TextsWorkload):
        return measure_sampled_texts(
            experiment, on_progress, predicted or predict_variants(experiment, on_progress) or {}
        )
    if isinstance(experiment.workload, TextAgreementWorkload):
        return measure_text_agreement(experiment, on_progress)
    if isinstance(experiment.workload, QualityWorkload):
        return measure_quality(experiment, on_progress, predicted)
    if isinstance(experiment.workload, SharedPrefixWorkload):
        return measure_shared_prefix(experiment, on_progress)
    if isinstance(experiment.workload, DeterminismWorkload):
        return measure_determinism(experiment, on_progress)
    if isinstance(experiment.workload, SpeculationWorkload):
        return measure_speculation(experiment, on_progress)
    if isinstance(experiment.workload, PrefillInterferenceWorkload):
        return measure_prefill_interference(experiment, on_progress)
    if isinstance(experiment.workload, StreamingWorkload):
        return measure_streaming(experiment, on_progress)
    if isinstance(experiment.workload, AgentWorkload):
        return measure_agent(experiment, on_progress)
    if simulated:
        return measure_simulated_variants(experiment, on_progress)
    return measure_serving(experiment, on_progress, predicted)


def chart_of(
    experiment: Experiment, rows: Sequence[Mapping[str, Any]]
) -> tuple[str, Callable[[Sequence[Mapping[str, Any]], str], Any]]:
    """Return the name of the chart for this kind of run, and the function that draws it from rows and a title."""
    if isinstance(experiment.workload, QualityWorkload):
        return "pareto", pareto.chart
    if isinstance(experiment.workload, DeterminismWorkload):
        return "determinism", determinism_chart.chart
    if isinstance(experiment.workload, SpeculationWorkload):
        return "speculation", speculation_chart.chart
    if isinstance(experiment.workload, LengthsWorkload):
        return "lengths", lengths_chart.chart
    if isinstance(experiment.workload, TextsWorkload):
        return "texts", texts_chart.chart
    if isinstance(experiment.workload, TextAgreementWorkload):
        return "text_agreement", agreement_chart.chart
    if isinstance(experiment.workload, AgentWorkload):
        return "agent", agent_chart.chart
    if all("predicted" in row and "curve" not in row for row in rows):
        return "latency", latency_chart.chart
    return "curves", curves.chart


def _draw(folder: RunFolder, experiment: Experiment, found: VariantResults) -> dict[str, Any] | None:
    """Write the chart as SVG and PNG, and return the files' names, or the reason why there is none."""
    name, draw = chart_of(experiment, found.rows)
    if problem := pareto.plotting_problem():
        return {"problem": problem}
    chart = draw(found.rows, experiment.question)
    folder.write_bytes(f"{name}.svg", pareto.render_chart(chart, "svg"))
    folder.write_bytes(f"{name}.png", pareto.render_chart(chart, "png"))
    return {"svg": f"{name}.svg", "png": f"{name}.png"}
