"""Compare runs with a baseline: differences, ratios, intervals, and the Pareto front."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from workbench.display import Displayable, Table
from workbench.errors import WorkbenchError
from workbench.machine.processor import MAX_CONTENTION, is_contended
from workbench.runs import measures
from workbench.runs.bootstrap import contrast
from workbench.runs.compared_run import ComparedRun, find_compared_runs, label_runs, repetition_key
from workbench.runs.metrics import pareto_frontier
from workbench.runs.record import Record
from workbench.runs.sql import suggest_columns
from workbench.units import format_percent

Samples = Mapping[Hashable, float]
VERDICT_CONFIDENCE = 0.9  # minimum confidence for a verdict of better or worse: reached by five repetitions
HEADINGS = ("measure", "setting", "median", "difference", "ratio", "sure", "repeated")


@dataclass(frozen=True)
class ComparisonRow:
    """One measure of one run, compared with the baseline.

    Intervals, with `confidence`, are None for a single repetition. `verdict` is better, worse or same if an interval of
    at least 90% confidence shows it.
    """

    measure: str
    label: str
    value: float
    baseline: float
    difference: float
    difference_low: float | None
    difference_high: float | None
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    confidence: float | None
    repetitions: int
    baseline_repetitions: int
    paired: bool
    verdict: str | None


@dataclass(frozen=True)
class RepeatedRuns:
    """Runs that repeat each other, under one label; most often a single run."""

    label: str
    runs: tuple[ComparedRun, ...]

    def samples(self, measure: str) -> Samples:
        """Return the values of a measure: by round for a single run; for several runs by run, each the median of its
        rounds."""
        each = [member.samples(measure) for member in self.runs]
        if len(each) == 1 or not all(each):
            return each[0] if len(each) == 1 else {}
        return {item.path: median(found.values()) for item, found in zip(self.runs, each, strict=True)}

    def value(self, measure: str) -> float | None:
        found = self.samples(measure)
        return median(found.values()) if found else None


@dataclass(frozen=True)
class Comparison(Displayable):
    """Rows ordered by measure, then by group, compared with the run labelled `baseline`.

    `noisy_runs` names runs that were measured under contention and are compared nevertheless.
    """

    baseline: str
    groups: tuple[RepeatedRuns, ...]
    rows: tuple[ComparisonRow, ...]
    noisy_runs: tuple[str, ...] = ()  # runs measured under contention, compared nevertheless

    def as_dicts(self) -> list[dict[str, Any]]:
        return [asdict(row) for row in self.rows]

    def pareto(self, x: str, y: str) -> list[dict[str, Any]]:
        """Return each group's values of two measures; `front` is true if no other group is at least as good in both and
        better in one.

        Args:
            x: measure of the first axis: `NAME`, `NAME:min` or `NAME:max`.
            y: measure of the second axis, written like `x`.

        Raises:
            WorkbenchError: if fewer than two groups have both measures.
        """
        across, up = measures.parse_objective(x), measures.parse_objective(y)
        points = [(group, group.value(across[0]), group.value(up[0])) for group in self.groups]
        whole = [(group, a, b) for group, a, b in points if a is not None and b is not None]
        if len(whole) < 2:
            known = sorted(set.intersection(*(_common_measures(group) for group in self.groups)))
            wrong = across[0] if len([a for _, a, _ in points if a is not None]) < 2 else up[0]
            raise WorkbenchError(f"--pareto {wrong}: fewer than two of these runs have it{_suggestion(wrong, known)}")
        signs = [1 if way == "min" else -1 for _, way in (across, up)]
        front = set(pareto_frontier([(signs[0] * a, signs[1] * b) for _, a, b in whole]))
        return [{"label": group.label, across[0]: a, up[0]: b, "front": index in front}
                for index, (group, a, b) in enumerate(whole)]  # fmt: skip

    def table(self) -> Table:
        noisy = ", ".join(self.noisy_runs)
        note = f"measured under contention, do not trust its times: {noisy}" if noisy else ""
        return Table(f"against {self.baseline}", [_cells(row) for row in self.rows], HEADINGS, note)

    _display_table = table


def compare(
    runs: Sequence[str | Path | Record],
    baseline: str | Path | Record,
    measure: Sequence[str] = (),
    force: bool = False,
    separate: bool = False,
) -> Comparison:
    """Compare each of `runs` with `baseline`.

        workbench.compare([record], f"{record.path}:dense", measure=["tpot_s_p50"])

    Args:
        runs: records or paths; `RUN:VARIANT` selects one variant, `RUN` all variants of a run.
        baseline: one run or variant.
        measure: names such as `ttft_s_p50`; default: the measures of `DEFAULT_MEASURES` that the runs share.
        force: also compare times measured while other processes used more than a tenth of the processor.
        separate: compare runs one by one, even if they differ only in seeds, on the same machine and code. By default
            such runs count as repetitions of one run.

    Raises:
        WorkbenchError: for an incomplete run, an unknown measure, or times of a noisy machine without `force`.
    """
    runs, baseline = [_path(run) for run in runs], _path(baseline)
    against = find_compared_runs(baseline)
    if len(against) != 1:
        here = ", ".join(repr(item.variant or item.run) for item in against)
        raise WorkbenchError(f"--baseline {baseline}: must be one run or variant, and this is {len(against)}: {here}")
    every = {(item.path, item.variant): item for asked in (baseline, *runs) for item in find_compared_runs(asked)}
    groups = _group_repetitions(list(every.values()), separate)
    base, others = groups[0], groups[1:]
    if not others:
        advice = "all repeat one run; --separate compares them one by one" if len(every) > 1 else "name another run"
        raise WorkbenchError(f"nothing to compare with {baseline}: {advice}")
    names = _measures(groups, measure)
    noisy = list(dict.fromkeys(item.run for item in every.values() if is_contended(item.contention)))
    if noisy and not force and (of_time := [name for name in names if measures.depends_on_time(name)]):
        raise WorkbenchError(
            f"{', '.join(noisy)}: other processes took more than {format_percent(MAX_CONTENTION)} of the processor, "
            f"so {of_time[0]} is not to be trusted; run again on a quiet machine, or --force"
        )
    rows = [_row(name, base, other) for name in names for other in others if other.samples(name)]
    return Comparison(base.label, tuple(groups), tuple(rows), tuple(noisy))


def _path(run: str | Path | Record) -> str:
    return str(run.path if isinstance(run, Record) else run)


def _group_repetitions(found: Sequence[ComparedRun], separate: bool) -> list[RepeatedRuns]:
    """Group items that are repetitions of one run; the first group contains the first item."""
    together: dict[str, list[ComparedRun]] = {}
    for index, item in enumerate(found):
        together.setdefault(str(index) if separate else repetition_key(item), []).append(item)
    members = list(together.values())
    return [
        RepeatedRuns(label, tuple(each))
        for label, each in zip(label_runs([m[0] for m in members]), members, strict=True)
    ]


def _measures(groups: Sequence[RepeatedRuns], names: Sequence[str]) -> list[str]:
    base = _common_measures(groups[0])
    shared = base & set.union(*(_common_measures(group) for group in groups[1:]))
    for name in map(measures.canonical_name, names):
        if name not in shared:
            where = "the baseline has none" if name not in base else "no other run has it"
            raise WorkbenchError(f"measure {name}: {where}{_suggestion(name, sorted(shared))}")
    found = [measures.canonical_name(name) for name in names] or [
        name for name in measures.DEFAULT_MEASURES if name in shared
    ]
    if not found:
        few = ", ".join(sorted(shared)[:8]) or "none"
        raise WorkbenchError(f"name a measure with --measure; these runs share, among others: {few}")
    return found


def _common_measures(group: RepeatedRuns) -> set[str]:
    each = [{*item.figures, *(name for figures in item.rounds.values() for name in figures)} for item in group.runs]
    return set.intersection(*each)


def _suggestion(name: str, known: Sequence[str]) -> str:
    return suggest_columns(name, known) if known else ""


def _row(measure: str, base: RepeatedRuns, other: RepeatedRuns) -> ComparisonRow:
    first, second = base.samples(measure), other.samples(measure)
    if not first:
        raise WorkbenchError(f"measure {measure}: no repetition of {base.label} has it")
    found = contrast(first, second)
    low, high = (None, None) if (i := found.difference_interval) is None else (i.low, i.high)
    least, most = (None, None) if (i := found.ratio_interval) is None else (i.low, i.high)
    return ComparisonRow(
        measure, other.label, median(second.values()), median(first.values()), found.difference, low, high,
        found.ratio, least, most, found.confidence, found.repetitions[1], found.repetitions[0], found.paired,
        _verdict(measure, low, high, found.confidence),
    )  # fmt: skip


def _verdict(measure: str, low: float | None, high: float | None, sure: float | None) -> str | None:
    better = measures.direction(measure)
    if low is None or high is None or better is None or (sure or 0.0) < VERDICT_CONFIDENCE:
        return None
    if low == high == 0:
        return "same"
    if low <= 0 <= high:
        return None
    return "better" if (low > 0) == (better == "max") else "worse"


def _cells(row: ComparisonRow) -> list[str]:
    ratio = "-" if row.ratio is None else f"{row.ratio:.3f}"
    if row.ratio_low is not None and row.ratio_high is not None:
        ratio += f" [{row.ratio_low:.3f}, {row.ratio_high:.3f}]"
    difference = f"{row.difference:+.4g}"
    if row.difference_low is not None and row.difference_high is not None:
        difference += f" [{row.difference_low:+.4g}, {row.difference_high:+.4g}]"
    times = (
        str(row.repetitions)
        if row.repetitions == row.baseline_repetitions
        else (f"{row.repetitions}, {row.baseline_repetitions}")
    )
    sure = (
        "one of each"
        if row.confidence is None and times == "1"
        else "-"
        if row.confidence is None
        else (format_percent(row.confidence) + (f", {row.verdict}" if row.verdict else ""))
    )
    paired = ", in turn" if row.paired and row.repetitions > 1 else ""
    return [row.measure, row.label, f"{row.value:.4g}", difference, ratio, sure, times + paired]
