"""Read a sweep's folder for a report, failed and pending points included, tabulate its points, and draw its measures
over each axis.

The files are those of `workbench sweep`: sweep.yaml, points/KEY/point.json, outcome.json and the run folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from markupsafe import Markup

from workbench.display import Table
from workbench.errors import WorkbenchError
from workbench.files import UnreadableText, read_bytes, read_json_object, read_yaml_file
from workbench.reports.charts import COLOURS, Series, line_chart
from workbench.reports.run_charts import ReportChart
from workbench.reports.run_tables import format_ms, format_rate
from workbench.reports.variants_table import COSTS, QUALITY, flatten
from workbench.runs.record import Record
from workbench.svg import Axis

SWEEP, POINTS, POINT, OUTCOME = "sweep.yaml", "points", "point.json", "outcome.json"
MAX_CHARTS = 12
SEED_SUFFIX = "seed"  # last piece of settings in which only repetitions differ
Cell = Callable[[Any], str]
RUN_MEASURES: tuple[tuple[str, str, Cell], ...] = (
    ("ttft_s.p50", "TTFT p50 ms", format_ms),
    ("ttft_s.p99", "TTFT p99 ms", format_ms),
    ("tpot_s.p50", "TPOT p50 ms", format_ms),
    ("itl_s.p99", "ITL p99 ms", format_ms),
    ("output_tokens_per_s", "output tokens/s", format_rate),
    ("prefill_tokens_per_s", "prefill tokens/s", format_rate),
    ("decode_tokens_per_s", "decode tokens/s", format_rate),
    ("kv.bytes_used_peak", "cache bytes", "{:,.0f}".format),
    ("goodput.share", "SLO attainment", "{:.1%}".format),
)


@dataclass(frozen=True)
class StoredPoint:
    """A point as stored.

    `settings` are those of the sweep (dotted path -> value); without record and error it has not run.
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

    WorkbenchError where `sweep.yaml` cannot be read; a damaged point has an `error` instead.
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
    """Return settings that differ between points, and their values in the order of the points."""
    paths = dict.fromkeys(path for point in sweep.points for path in point.settings)
    found = {path: _distinct(point.settings.get(path) for point in sweep.points) for path in paths}
    return {path: values for path, values in found.items() if len(values) > 1}


def available_measures(sweep: StoredSweep) -> list[tuple[str, str, Cell]]:
    """Return the measures that any point has; of a table of variants, those of its first row."""
    figures = [point_measures(point) for point in sweep.points]
    return [each for each in (*RUN_MEASURES, *QUALITY, *COSTS) if any(is_number(row.get(each[0])) for row in figures)]


def point_measures(point: StoredPoint) -> dict[str, Any]:
    """Return a point's numbers by name, names of groups joined by dots."""
    if point.record is None:
        return {}
    summary = point.record.summary
    rows = summary.get("rows")
    return flatten(rows[0] if rows else summary)


def sweep_table(sweep: StoredSweep) -> Table:
    """Tabulate the points: each one's settings, measures and state."""
    axes, measures = swept_axes(sweep), available_measures(sweep)
    rows = []
    for point in sweep.points:
        figures = point_measures(point)
        cells = [format_setting(point.settings.get(path)) for path in axes]
        cells += ["-" if figures.get(key) is None else tell(figures[key]) for key, _, tell in measures]
        link = Markup('<a href="#{}">{}</a>').format(point.anchor, point.label)
        state = Markup('<span class="serious">{}</span>').format(point.error) if point.error else point.state
        rows.append((link, *cells, state))
    headings = ("point", *axes, *(heading for _, heading, _ in measures), "state")
    return Table("", rows, headings, left=("state",))


def sweep_charts(sweep: StoredSweep) -> Iterator[ReportChart]:
    """Draw a chart for each axis and measure: medians of repetitions, one line for each setting of the other axes."""
    axes = {path: values for path, values in swept_axes(sweep).items() if path.rsplit(".", 1)[-1] != SEED_SUFFIX}
    made = 0
    for key, heading, _ in available_measures(sweep):
        for path, values in axes.items():
            series = _series(sweep.points, key, path, values, [other for other in axes if other != path])
            flat = len({y for each in series for _, y in each.points}) < 2
            if made == MAX_CHARTS or flat or len(series) > COLOURS:
                continue
            made += 1
            numbers = all(is_number(value) for value in values)
            names = () if numbers else tuple(format_setting(value) for value in values)
            log = numbers and min(values) > 0 and max(values) / min(values) >= 8
            title = heading.removesuffix(" ms") + (", s" if heading.endswith(" ms") else "")
            caption = f"{title} over {path}"
            yield ReportChart(caption, line_chart(series, Axis(path, log, names), Axis(title), caption))


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
        Series(name, tuple((place, median(each)) for place, each in sorted(figures.items())), marked=True)
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
