"""Print the report of a run in a terminal."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.text import Text

from workbench.experiment.experiment import Experiment
from workbench.reports import variants_table as comparison_text
from workbench.reports.run_tables import run_remarks, run_tables
from workbench.runs.record import Record
from workbench.trace.recorder import row_name

MAX_TEXTS = 3


def show(record: Record, console: Console, file: Path | None = None) -> None:
    """Print the report of a finished run. `file` is the YAML file of its experiment, if known."""
    experiment = Experiment.from_record(record.experiment_text)
    if "rows" in record.summary:
        comparison_text.show(record, console)
        return
    for part in _parts(record, experiment, file or record.path / "experiment.yaml"):
        console.print(part, soft_wrap=isinstance(part, Text))  # a path must stay on one line, so that it can be copied


def _parts(record: Record, experiment: Experiment, file: Path) -> Iterator[RenderableType]:
    summary = record.summary
    yield Text(experiment.question, style="bold")
    yield from _texts(record, experiment)
    yield from run_tables(summary)
    yield Text()
    for remark in run_remarks(summary):
        yield Text(remark.text, style="yellow" if remark.is_warning else "")
    yield Text(f"\nrun folder  {record.path}", style="bold")
    yield Text(_next_steps(record, experiment, file))


def _texts(record: Record, experiment: Experiment) -> Iterator[RenderableType]:
    prompts = getattr(experiment.workload, "prompts", ())
    copies = getattr(experiment.workload, "copies", 1) * experiment.sampling.num_sequences
    rows = record.requests.to_pylist()
    for index, row in enumerate(rows[:MAX_TEXTS]):
        if row["error"]:
            yield Panel(Text(row["error"], style="red"), title=Text(f"{row_name(row)}: {row['finish_reason']}"))
        elif prompts:
            text = Text(prompts[index // copies], style="dim") + Text(row["output_text"], style="default")
            title = f"{row_name(row)}: {row['output_tokens']} tokens, {row['finish_reason']}"
            yield Panel(text, title=Text(title))
    if len(rows) > MAX_TEXTS:
        yield Text(f"and {len(rows) - MAX_TEXTS} more requests in requests.parquet", style="dim")


def _next_steps(record: Record, experiment: Experiment, file: Path) -> str:
    """Suggest commands to run next, such as this run's experiment with changed settings."""
    workbench, real = _program(), experiment.executor.kind == "real"
    changes = ["backend=eager"] if real and experiment.backend != "eager" else []
    changes += ["workload.copies=8"] if getattr(experiment.workload, "copies", 8) != 8 else []
    demo = real and experiment.model.name == "demo"
    lines = [
        "try next",
        f"{workbench} reproduce {record.path}",
        f"{workbench} report {record.path}",
        *(f"{workbench} run {file} --set {change}" for change in changes),
        *([f'{workbench} generate "class Stack:" --temperature 0.8'] if demo else []),
        f"open {record.path / 'trace.json'} in ui.perfetto.dev",
    ]
    return "\n  ".join(lines)


def _program() -> str:
    """Return the name of the command if it is on PATH, else its full path."""
    if shutil.which("workbench"):
        return "workbench"
    place = os.path.relpath(Path(sys.executable).parent / "workbench")
    return place if len(place) < 40 else "workbench"
