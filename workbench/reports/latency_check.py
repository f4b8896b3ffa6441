"""Check whether a repeated run's latencies lie within the recorded spread. The check does not concern the correctness
of outputs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from workbench.errors import WorkbenchError
from workbench.reports.differences import HARDWARE_ENTRIES, environment_differences
from workbench.runs.condition import MANIFEST
from workbench.runs.metrics import per_request, percentile
from workbench.runs.record import Record
from workbench.units import format_seconds

LATENCIES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "itl_s": "ITL", "e2el_s": "E2EL"}
# the only latencies compared in a replay, which forms steps as recorded and ignores the clock
STEP_LATENCIES = ("tpot_s", "itl_s")
MAX_REPETITIONS = 50  # number of the latest repetitions used
STAMP = re.compile(r"-\d{8}-\d{6}-[0-9a-f]+$")


@dataclass(frozen=True)
class LatencyCheck:
    """The median of one latency in seconds, in the record and in the repetition, and the spread that their difference
    is compared with.

    `spread_source` describes the origin of the spread.
    """

    name: str
    was: float
    now: float
    low: float
    high: float
    spread_source: str

    @property
    def within_spread(self) -> bool:
        return self.low <= self.now <= self.high

    def __str__(self) -> str:
        side = "inside" if self.within_spread else "above" if self.now > self.high else "below"
        spread = f"{format_seconds(self.low)} to {format_seconds(self.high)} in {self.spread_source}"
        times = f"{format_seconds(self.now)}, was {format_seconds(self.was)}"
        return f"{self.name} p50 {times}: {side} the spread ({spread})"


def check_latencies(before: Record, after: Record) -> tuple[LatencyCheck, ...]:
    """Compare the median of each latency in the repetition with the record, relative to the spread.

    The spread is that of repetitions of the run in the same folder (same experiment, same hardware). Without
    repetitions it is the range from the 10th to the 90th percentile within the recorded run. For a replay only the
    times between tokens are compared.
    """
    replayed = after.summary.get("replayed_steps") is not None
    repeated = [before, *find_repetitions(before, after)]
    found = []
    for key, name in LATENCIES.items():
        if replayed and key not in STEP_LATENCIES:
            continue
        was, now = (record.summary.get(key, {}).get("p50") for record in (before, after))
        if was is None or now is None:
            continue
        medians = [value for record in repeated if (value := record.summary.get(key, {}).get("p50")) is not None]
        if len(medians) > 1:
            spread, spread_source = (min(medians), max(medians)), f"{len(medians)} recorded repetitions"
        else:
            values = list(_values(before, key))
            low, high = percentile(values, 10), percentile(values, 90)
            if low is None or high is None:
                continue
            spread, spread_source = (low, high), f"the recorded run, p10 to p90 of {len(values)}"
        found.append(LatencyCheck(name, was, now, *spread, spread_source))
    return tuple(found)


def find_repetitions(record: Record, exclude: Record | None = None) -> list[Record]:
    """List other finished runs of the same experiment on the same hardware in the same folder, latest first."""
    wanted = record.manifest.get("experiment.yaml")
    stem = STAMP.sub("", record.name)
    out = []
    for path in _beside(record, (stem, "reproduce")):
        try:
            other = Record.open(path)
            same = other.manifest.get("experiment.yaml") == wanted and not environment_differences(
                record, other, HARDWARE_ENTRIES
            )
            if same and other.summary.get("replayed_steps") is None:
                out.append(other)
        except WorkbenchError:  # skip a damaged or unfinished run
            continue
        if len(out) == MAX_REPETITIONS:
            break
    mine = {each.path.resolve() for each in (record, exclude) if each is not None}
    return [other for other in out if other.path.resolve() not in mine]


def _beside(record: Record, stems: Sequence[str]) -> list[Path]:
    folder = record.path.resolve().parent
    found = (path for stem in dict.fromkeys(stems) for path in folder.glob(f"{stem}-*") if (path / MANIFEST).is_file())
    return sorted(found, key=lambda path: path.name[len(STAMP.sub("", path.name)) :], reverse=True)


def _values(record: Record, key: str) -> Iterator[float]:
    """Yield the values of a latency: one for every request of a run, or one for every token."""
    for row in per_request(record.requests.to_pylist(), record.tokens.to_pylist()):
        value = row[key]
        if isinstance(value, list):
            yield from value
        elif value is not None:
            yield value
