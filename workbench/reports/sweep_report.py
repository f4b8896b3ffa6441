"""Read a sweep's folder for a report, with failed and pending points, tabulate its points, and draw its measures over
each axis.

The files are those that `workbench sweep` writes: sweep.yaml, points/KEY/point.json, outcome.json and the run folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from markupsafe import Markup

from workbench.display import Table
from workbench.errors import WorkbenchError
from workbench.figures.figure import SHAPES
from workbench.figures.lines import Series, lines
from workbench.files import UnreadableText, read_bytes, read_json_object, read_yaml_file
from workbench.measure.chart import axis_title
from workbench.reports.run_charts import ReportChart
from workbench.reports.variants_table import COSTS, QUALITY, flatten, heading
from workbench.runs.measures import format_measure, own_measures
from workbench.runs.record import Record
from workbench.svg import Axis

SWEEP, POINTS, POINT, OUTCOME = "sweep.yaml", "points", "point.json", "outcome.json"
MAX_CHARTS = 12
SEED_SUFFIX = "seed"  # last part of the paths of settings that differ between repetitions
RUN_MEASURES = (
    "ttft_s.p50", "ttft_s.p99", "tpot_s.p50", "itl_s.p99", "output_tokens_per_s", "prefill_tokens_per_s",
    "decode_tokens_per_s", "kv.bytes_used_peak", "goodput.share",
)  # fmt: skip


@dataclass(frozen=True)
class StoredPoint:
    """A point of a sweep as stored in the sweep's folder.

    `settings` are the settings of the sweep (dotted path -> value). A point without record and error has not run yet.
    """

    number: int
    key: str
    label: str
    settings: Mapping[str, Any]
    record: Record | None
    error: str | None

    @property
    def anchor(self) -> str:
        return f"point-{self.number}"

    @property
    def state(self) -> str:
        return "failed" if self.error else "done" if self.record else "not run"


@dataclass(frozen=True)
class StoredSweep:
    path: Path
    name: str
    experiment: Mapping[str, Any] = field(repr=False)
    points: tuple[StoredPoint, ...] = field(repr=False)

    @property
    def counts(self) -> dict[str, int]:
        states = [point.state for point in self.points]
        return {state: states.count(state) for state in ("done", "failed", "not run") if state in states}


def is_sweep(path: Path) -> bool:
    return (path / SWEEP).is_file()


def read_sweep(path: Path) -> StoredSweep:
    """Read a sweep's folder.

    Raises WorkbenchError if `sweep.yaml` cannot be read. A damaged point is returned with an `error`.
    """
    try:
        values = read_yaml_file(path / SWEEP)
        named = [(str(each["key"]), str(each["label"])) for each in values["points"]]
        experiment, name = dict(values["experiment"]), str(values["name"])
    except (ValueError, LookupError, TypeError) as error:
        raise WorkbenchError(f"{path / SWEEP}: cannot be read as a sweep's ({type(error).__name__}: {error})") from None
    points = (_point(path / POINTS / key, number, key, label) for number, (key, label) in enumerate(named, 1))
    return StoredSweep(path, name, experiment, tuple(points))


def _point(folder: Path, number: int, key: str, label: str) -> StoredPoint:
    settings = _object(folder / POINT).get("settings")
    outcome = _object(folder / OUTCOME)
    error, run = outcome.get("error"), outcome.get("run")
    record = None
    if run:
        try:
            record = Record.open(folder / Path(str(run)).name)
        except WorkbenchError as found:
            error = error or str(found)
    message = str(error) if error else None
    return StoredPoint(number, key, label, settings if isinstance(settings, dict) else {}, record, message)


def _object(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(read_bytes(path))
    except UnreadableText:
        return {}


def swept_axes(sweep: StoredSweep) -> dict[str, list[Any]]:
    """Return the settings that differ between points, by path, each with its values in the order of the points."""
    paths = dict.fromkeys(path for point in sweep.points for path in point.settings)
    found = {path: _distinct(point.settings.get(path) for point in sweep.points) for path in paths}
    return {path: values for path, values in found.items() if len(values) > 1}


def available_measures(sweep: StoredSweep) -> list[str]:
    """Return the names of the measures that at least one point has. A point that compares variants counts with its
    first row."""
    figures = [point_measures(point) for point in sweep.points]
    known = dict.fromkeys((*RUN_MEASURES, *QUALITY, *COSTS, *own_measures()))
    return [name for name in known if any(is_number(row.get(name)) for row in figures)]


def point_measures(point: StoredPoint) -> dict[str, Any]:
    """Return a point's figures by name; names in nested groups are joined with dots."""
    if point.record is None:
        return {}
    summary = point.record.summary
    rows = summary.get("rows")
    return flatten(rows[0] if rows else summary)


def sweep_table(sweep: StoredSweep) -> Table:
    """Build the table of points: settings, measures and state of each."""
    axes, measures = swept_axes(sweep), available_measures(sweep)
    rows = []
    for point in sweep.points:
        figures = point_measures(point)
        cells = [format_setting(point.settings.get(path)) for path in axes]
        cells += [format_measure(name, figures.get(name)) for name in measures]
        link = Markup('<a href="#{}">{}</a>').format(point.anchor, point.label)
        state = Markup('<span class="serious">{}</span>').format(point.error) if point.error else point.state
        rows.append((link, *cells, state))
    headings = ("point", *axes, *map(heading, measures), "state")
    return Table("", rows, headings, left=("state",))


def sweep_charts(sweep: StoredSweep) -> Iterator[ReportChart]:
    """Draw a chart for each axis and measure: medians over repetitions, with one line for each combination of the other
    axes' settings."""
    axes = {path: values for path, values in swept_axes(sweep).items() if path.rsplit(".", 1)[-1] != SEED_SUFFIX}
    made = 0
    for key in available_measures(sweep):
        title = axis_title(key)
        for path, values in axes.items():
            series = _series(sweep.points, key, path, values, [other for other in axes if other != path])
            flat = len({y for each in series for _, y in each.points}) < 2
            if made == MAX_CHARTS or flat or len(series) > len(SHAPES):
                continue
            made += 1
            numbers = all(is_number(value) for value in values)
            names = () if numbers else tuple(format_setting(value) for value in values)
            log = numbers and min(values) > 0 and max(values) / min(values) >= 8
            caption = f"{title} over {path}"
            yield ReportChart.of(caption, lines(series, Axis(path, log, names), Axis(title), zero=True))


def _series(
    points: Sequence[StoredPoint], key: str, path: str, values: Sequence[Any], others: Sequence[str]
) -> list[Series]:
    numbers = all(is_number(value) for value in values)
    found: dict[str, dict[float, list[float]]] = {}
    for point in points:
        figure = point_measures(point).get(key)
        if figure is None or not is_number(figure) or path not in point.settings:
            continue
        name = " ".join(f"{other}={format_setting(point.settings.get(other))}" for other in others)
        place = point.settings[path] if numbers else values.index(point.settings[path])
        found.setdefault(name, {}).setdefault(float(place), []).append(float(figure))
    return [
        Series(name, tuple((place, median(each)) for place, each in sorted(figures.items())))
        for name, figures in found.items()
    ]


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def format_setting(value: Any) -> str:
    return value if isinstance(value, str) else "-" if value is None else str(value)


def _distinct(values: Iterator[Any]) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found
