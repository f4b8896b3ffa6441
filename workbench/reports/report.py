"""Render a run or a sweep as one HTML file that loads no scripts, fonts or other files and needs no network."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from workbench.display import Table
from workbench.errors import WorkbenchError
from workbench.experiment import yaml as yaml_text
from workbench.files import write_atomically
from workbench.reports.run_charts import ReportChart
from workbench.reports.run_report import NO_PREDICTION, RunReport, build_run_report, changed_settings, read_question
from workbench.reports.self_contained import external_resources
from workbench.reports.sweep_report import StoredPoint, StoredSweep, is_sweep, read_sweep, sweep_charts, sweep_table
from workbench.runs.record import Record

MAX_POINTS_DRAWN = 24  # number of a sweep's points that have their own charts


@dataclass(frozen=True)
class ReportPage:
    """The input of the HTML template: for a run the field `run`, for a sweep all other fields."""

    question: str
    name: str
    line: str
    run: RunReport | None = None
    table: Table | None = None
    pictures: Sequence[ReportChart] = ()
    changed: Sequence[tuple[str, str]] = ()
    experiment: str = ""
    environment: Sequence[tuple[str, str]] = ()
    other_environments: Sequence[str] = ()
    commands: Sequence[tuple[str, str]] = ()
    points: Sequence[tuple[StoredPoint, RunReport | None]] = ()


def write_report(folder: Path | str, out: Path | None = None) -> Path:
    """Write the report of the run or sweep in `folder`, and return its path.

    The report is written to `out`, or next to the folder as NAME.html. A run's folder is not changed, because its
    manifest lists all of its files. Raises WorkbenchError if the file cannot be written.
    """
    folder = Path(folder)
    out = out or folder.resolve().with_name(f"{folder.resolve().name}.html")
    text = render_report(folder)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, lambda file: file.write(text.encode("utf-8", "xmlcharrefreplace")))
    except OSError as error:
        reason = error.strerror or error
        raise WorkbenchError(f"{out}: cannot be written ({reason}); give another file with --out") from error
    return out


def render_report(folder: Path | str) -> str:
    """Return the report as HTML. Raises WorkbenchError if `folder` has neither a complete run nor a sweep."""
    folder = Path(folder)
    page = _sweep_page(read_sweep(folder)) if is_sweep(folder) else _run_page(Record.open(folder))
    text = _template().render(page=page, no_prediction=NO_PREDICTION)
    if found := external_resources(text):  # a bug of ours: users' texts are escaped, and charts are data
        raise AssertionError(f"the report of {folder} would load {found[0]}; a report is one file that loads nothing")
    return text


def _run_page(record: Record) -> ReportPage:
    part = build_run_report(record)
    date = dict(part.environment).get("date", "")
    return ReportPage(part.question, record.name, f"Run {record.name}, {date}", run=part)


def _sweep_page(sweep: StoredSweep) -> ReportPage:
    done = [point for point in sweep.points if point.record is not None]
    drawn = {point.key for point in done[:MAX_POINTS_DRAWN]}
    points = [
        (point, build_run_report(point.record, point.key in drawn) if point.record else None) for point in sweep.points
    ]
    ran = [(point, part) for point, part in points if part is not None]
    counts = ", ".join(f"{count} {state}" for state, count in sweep.counts.items())
    text = yaml_text.write_yaml(dict(sweep.experiment))
    environment = ran[0][1].environment if ran else ()
    return ReportPage(
        read_question(text),
        sweep.name,
        f"Sweep {sweep.path.resolve().name}: {len(sweep.points)} points ({counts})",
        table=sweep_table(sweep),
        pictures=list(sweep_charts(sweep)),
        changed=changed_settings(text),
        experiment=text,
        environment=environment,
        other_environments=list(_environment_differences(ran)),
        commands=(("workbench sweep experiment.yaml", "after saving the YAML of this page as experiment.yaml"),),
        points=points,
    )


def _environment_differences(ran: Sequence[tuple[StoredPoint, RunReport]]) -> list[str]:
    """Describe the points that ran on another machine, or with other versions, than the first point."""
    fixed = ("processor", "memory", "accelerator", "python", "packages", "commit")
    found = []
    for point, part in ran[1:]:
        first, mine = dict(ran[0][1].environment), dict(part.environment)
        if other := [name for name in fixed if first.get(name) != mine.get(name)]:
            found.append(f"{point.label}: ran with another {', '.join(other)}")
    return found


def _template():
    environment = Environment(
        loader=PackageLoader("workbench.reports", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"as_image": _as_image, "as_drawn": Markup}
    return environment.get_template("report.html.j2")


def _as_image(svg: str) -> str:
    """Encode a stored picture as an image: an image runs no script and loads nothing, whatever it contains."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode("utf-8", "replace")).decode()
