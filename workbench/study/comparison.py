"""An experiment's variants side by side: one table, pictures, verdicts, in a run folder."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from workbench.errors import WorkbenchError
from workbench.study import pareto, speculation_chart
from workbench.study.environment import environment
from workbench.study.experiment import Experiment
from workbench.study.findings import Findings
from workbench.study.machine import cpu_times, others_cpu_share
from workbench.study.quality import quality
from workbench.study.quality_workload import QualityWorkload, SharedPrefixWorkload
from workbench.study.record import Record, RunFolder
from workbench.study.run import threads
from workbench.study.shared_prefix import shared_prefix
from workbench.study.side_by_side import side_by_side
from workbench.study.speculating import speculating
from workbench.study.speculation_workload import SpeculationWorkload
from workbench.study.verdict import verdicts
from workbench.user_parts import find


def run_comparison(
    experiment: Experiment, out: Path | str = "runs", name: str = "run", progress: bool = True
) -> Record:
    """Measure every variant and write the run's folder below `out`; a mistake in the input leaves none."""
    if experiment.judge is not None:
        find(experiment.judge.path)  # told before anything is measured
    folder = RunFolder.create(Path(out), name)
    folder.write_text("experiment.yaml", experiment.to_yaml())
    folder.write_json("environment.json", environment())
    before, began = cpu_times(), time.perf_counter()
    try:
        with threads(experiment.measure.threads), tqdm(bar_format="{desc} [{elapsed}]", disable=not progress) as bar:
            found = findings(experiment, bar.set_description)
        judged = verdicts(experiment.judge, found.rows)
    except WorkbenchError:
        shutil.rmtree(folder.path, ignore_errors=True)
        raise
    summary = {
        "rows": found.rows,
        "about": found.about,
        "verdicts": [each.as_dict() for each in judged],
        "wall_s": time.perf_counter() - began,
        "others_cpu_share": others_cpu_share(before),
        "picture": _draw(folder, experiment, found),
    }
    for table, rows in found.tables.items():
        if rows:
            folder.write_table(f"{table}.parquet", rows)
    folder.write_json("summary.json", summary)
    return Record.open(folder.finish())


def findings(experiment: Experiment, tell: Callable[[str], None] = lambda line: None) -> Findings:
    """The comparison itself, by the kind of workload."""
    if isinstance(experiment.workload, QualityWorkload):
        return quality(experiment, tell)
    if isinstance(experiment.workload, SharedPrefixWorkload):
        return shared_prefix(experiment, tell)
    if isinstance(experiment.workload, SpeculationWorkload):
        return speculating(experiment, tell)
    return side_by_side(experiment, tell)


def _draw(folder: RunFolder, experiment: Experiment, found: Findings) -> dict[str, Any] | None:
    """The picture of a run that has one, as SVG and PNG; why there is none, where there is none."""
    if not isinstance(experiment.workload, QualityWorkload | SpeculationWorkload):
        return None
    if problem := pareto.plotting_problem():
        return {"problem": problem}
    if isinstance(experiment.workload, SpeculationWorkload):
        folder.write_text("speculation.svg", speculation_chart.svg(found.rows, experiment.question))
        folder.write_bytes("speculation.png", speculation_chart.png(found.rows, experiment.question))
        return {"svg": "speculation.svg", "png": "speculation.png"}
    folder.write_text("pareto.svg", pareto.svg(found.rows, experiment.question))
    folder.write_bytes("pareto.png", pareto.png(found.rows, experiment.question))
    return {"svg": "pareto.svg", "png": "pareto.png"}
