"""Run a sweep: give points without an outcome to an executor, and collect one row per point."""

from __future__ import annotations

import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from types import FrameType
from typing import Literal

from workbench.display import Displayable, Table
from workbench.experiment.experiment import Experiment
from workbench.progress import BAR_FORMAT, Progress, refreshing
from workbench.sweep.executor import SweepExecutor
from workbench.sweep.folder import SweepFolder, open_sweep
from workbench.sweep.point import LOG, OUTCOME, PointResult, SweepPoint
from workbench.sweep.settings import LocalSweepConfig, RaySweepConfig, SlurmSweepConfig, SweepExecutorSetting
from workbench.units import format_bytes, format_duration

MAX_ATTEMPTS = 2  # runs of a point if its worker dies


def make_executor(setting: SweepExecutorSetting) -> SweepExecutor:
    """Create the executor of a setting, importing its dependencies."""
    match setting:
        case LocalSweepConfig():
            from workbench.sweep.local import LocalSweepExecutor

            return LocalSweepExecutor(setting)
        case RaySweepConfig():
            from workbench.sweep.ray import RaySweepExecutor

            return RaySweepExecutor(setting)
        case SlurmSweepConfig():
            from workbench.sweep.slurm import SlurmSweepExecutor

            return SlurmSweepExecutor(setting)


@dataclass(frozen=True)
class SweepRow:
    """A point of a sweep and its outcome, which is None if the point has not run, or still runs elsewhere."""

    point: SweepPoint
    outcome: PointResult | None

    @property
    def state(self) -> Literal["done", "failed", "to run"]:
        if self.outcome is None:
            return "to run"
        return "done" if self.outcome.error is None else "failed"


class SweepRows(Displayable, list[SweepRow]):
    """The points of the sweep in `folder` with their outcomes, in order."""

    folder: Path

    def _display_table(self) -> Table:
        cells = [(r.point.label, r.state, *_outcome_cells(r.outcome, self.folder)) for r in self]
        states = [row.state for row in self]
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        headings = ("point", "state", "time", "memory", "run folder, or error")
        return Table(f"{self.folder}: {counts}", cells, headings, left=("state", headings[-1]))


def _outcome_cells(outcome: PointResult | None, sweep: Path) -> tuple[str, str, str]:
    if outcome is None:
        return "", "", ""
    run = "" if outcome.folder is None else str(outcome.folder.relative_to(sweep))
    where = "; ".join(filter(None, [outcome.error, run]))
    return format_duration(outcome.seconds), format_bytes(outcome.peak_bytes), where


def read_rows(sweep: SweepFolder) -> SweepRows:
    """Read the present state of all points of a sweep."""
    rows = SweepRows(SweepRow(point, PointResult.read(point.folder)) for point in sweep.points)
    rows.folder = sweep.path
    return rows


def run_sweep(
    sweep: SweepFolder | Experiment | Path | str,
    executor: SweepExecutor | None = None,
    retry_failed: bool = False,
    attempts: int = MAX_ATTEMPTS,
    progress: bool = True,
    expected_seconds: Mapping[str, float | None] | None = None,
    *,
    sets: Sequence[str] = (),
    out: Path | str = "runs",
) -> SweepRows:
    """Run every point of a sweep that has no outcome.

        rows = workbench.run_sweep("experiments/first_light.yaml", sets=["cache.format=dense,int8"])
        rows = workbench.run_sweep(rows.folder)  # after the stop button: run the missing points

    A failed point is a row with its error. However a sweep ends, finished points stay finished.

    Args:
        sweep: an experiment or its YAML file, which makes a new sweep below `out`, or the folder of a sweep to resume.
        executor: runs the points; default: one after another on this machine.
        retry_failed: also run points with an error again.
        attempts: maximum runs of a point, if its worker dies.
        progress: show a progress bar.
        expected_seconds: weights of the points in the progress bar, by key.
        sets: `PATH=VALUE,VALUE` each, an axis; one value changes the experiment.
        out: folder for new sweeps.
    """
    sweep = sweep if isinstance(sweep, SweepFolder) else open_sweep(sweep, sets, Path(out))
    executor = executor or make_executor(LocalSweepConfig())
    sweep.write()
    waiting = [row.point for row in read_rows(sweep) if _needs_run(row, retry_failed)]
    with _bar(sweep, waiting, expected_seconds or {}, progress) as bar, _terminate_as_interrupt():
        on_end = _OutcomeCollector({point.folder: point for point in waiting}, attempts, bar)
        todo = list(on_end.points)
        while todo:
            executor.run(todo, on_end)
            todo, on_end.again = on_end.again, []
    return read_rows(sweep)


class _OutcomeCollector:
    """Collect the outcomes of workers that have ended; a point without an outcome is retried or given up."""

    def __init__(self, points: Mapping[Path, SweepPoint], attempts: int, bar: _Bar) -> None:
        self.points, self.attempts, self.bar = points, attempts, bar
        self.died: Counter[Path] = Counter()
        self.again: list[Path] = []

    def __call__(self, folder: Path) -> None:
        point, outcome = self.points[folder], PointResult.read(folder)
        if outcome is None:
            self.died[folder] += 1
            if self.died[folder] < self.attempts:
                self.bar.tell(f"{point.label}: its worker died; it runs again")
                self.again.append(folder)
                return
            outcome = PointResult(point.key, None, _death_message(folder, self.died[folder]), 0.0)
            outcome.write(folder)
        self.bar.add(point, outcome)


def _needs_run(row: SweepRow, retry_failed: bool) -> bool:
    if row.state == "failed" and retry_failed:
        (row.point.folder / OUTCOME).unlink()
        return True
    return row.outcome is None


def _death_message(folder: Path, times: int) -> str:
    try:
        lines = (folder / LOG).read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        lines = []
    last_line = next((line.strip() for line in reversed(lines) if line.strip()), "nothing")
    return f"its worker died {times} times, perhaps for lack of memory; its {LOG} ends with: {last_line}"


class _Bar:
    """A progress bar over points, weighted by their expected seconds."""

    def __init__(self, bar: Progress, weights: Mapping[str, float], done: int, points: int) -> None:
        self.bar, self.weights, self.done, self.points = bar, weights, done, points
        self._describe()

    def add(self, point: SweepPoint, outcome: PointResult) -> None:
        if outcome.error is not None:
            self.tell(f"{point.label}: {outcome.error}")
        self.done += 1
        self._describe()
        self.bar.update(self.weights[point.key])

    def tell(self, line: str) -> None:
        Progress.write(line, file=sys.stderr)

    def _describe(self) -> None:
        self.bar.set_description_str(f"{self.done} of {self.points} points", refresh=False)


@contextmanager
def _bar(
    sweep: SweepFolder, waiting: list[SweepPoint], expected_seconds: Mapping[str, float | None], progress: bool
) -> Iterator[_Bar]:
    known = [seconds for point in waiting if (seconds := expected_seconds.get(point.key))]
    usual = fmean(known) if known else 1.0
    weights = {point.key: expected_seconds.get(point.key) or usual for point in waiting}
    with (
        Progress(total=sum(weights.values()), smoothing=0, bar_format=BAR_FORMAT, disable=not progress) as bar,
        refreshing(bar),
    ):
        yield _Bar(bar, weights, len(sweep.points) - len(waiting), len(sweep.points))


@contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C: end workers, and report finished points."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
