"""Check a run's latencies against the recorded spread. They say nothing about correctness."""

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

LATENCIES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "itl_s": "ITL", "e2el_s": "E2EL"}
STEP_LATENCIES = ("tpot_s", "itl_s")  # a replay has these too: it submits by step and ignores the clock
MAX_REPETITIONS = 50  # the latest repetitions
STAMP = re.compile(r"-\d{8}-\d{6}-[0-9a-f]+$")


@dataclass(frozen=True)
class LatencyCheck:
    """A median latency in seconds, now and as recorded, and the spread it is compared with.

    `spread_source` names the source of the spread.
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
        spread = f"{self.low * 1e3:,.2f} to {self.high * 1e3:,.2f} in {self.spread_source}"
        return f"{self.name} p50 {self.now * 1e3:,.2f} ms, was {self.was * 1e3:,.2f}: {side} the spread ({spread})"


def check_latencies(before: Record, after: Record) -> tuple[LatencyCheck, ...]:
    """Compare each latency's median with its spread.

    The spread is over repetitions of the run in the same folder (the same experiment on the same hardware). Without any
    it goes from the 10th to the 90th percentile within the recorded run. A replay is compared by the times between
    tokens alone.
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
    """List other finished runs of the same experiment on the same hardware in the same folder, the latest first."""
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
        except WorkbenchError:  # damaged or unfinished: no evidence
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
    """Yield a latency of every request of a run, or of every token."""
    for row in per_request(record.requests.to_pylist(), record.tokens.to_pylist()):
        value = row[key]
        if isinstance(value, list):
            yield from value
        elif value is not None:
            yield value
