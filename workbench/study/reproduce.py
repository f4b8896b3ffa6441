"""Running a record's experiment again, and saying what came out differently."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from workbench.errors import WorkbenchError
from workbench.study.experiment import Experiment
from workbench.study.record import Record
from workbench.study.run import run
from workbench.trace.recorder import row_name

WATCHED = ("python", "machine", "packages", "threads", "gpu", "lane", "commit")


@dataclass(frozen=True)
class Comparison:
    """`tokens` names each request whose token ids differ, and where; `surroundings` what else differs."""

    again: Record
    requests: int
    tokens: tuple[str, ...] = ()
    surroundings: tuple[str, ...] = field(default=())

    @property
    def identical(self) -> bool:
        return not self.tokens

    def __str__(self) -> str:
        verdict = (
            f"identical tokens in all {self.requests} requests"
            if self.identical
            else f"tokens differ in {len(self.tokens)} of {self.requests} requests"
        )
        lines = [verdict, *self.tokens, *(f"differs: {line}" for line in self.surroundings)]
        return "\n".join(lines)


def reproduce(record: Record, out: Path | None = None, progress: bool = True) -> Comparison:
    """Run `record`'s experiment again, into a folder beside it unless `out` says otherwise, and compare.

    A record that was damaged or changed since it was written raises WorkbenchError before any work.
    """
    record.verify()
    experiment = Experiment.from_yaml(record.experiment_text, where=f"{record.path}/experiment.yaml")
    if experiment.compares:
        raise WorkbenchError(
            f"{record.path}: a table of variants, not one run of requests; "
            "`workbench run` of its experiment.yaml makes it anew"
        )
    again = run(experiment, out or record.path.resolve().parent, "reproduce", progress)
    return compare(record, again)


def compare(before: Record, after: Record) -> Comparison:
    """What differs between two runs of one experiment."""
    first, second = (
        {row_name(row): row for row in record.requests.to_pylist()} for record in (before, after)
    )
    tokens = [f"{name}: only in one of the runs" for name in sorted(first.keys() ^ second.keys())]
    for name in first.keys() & second.keys():
        line = _difference(first[name]["token_ids"], second[name]["token_ids"])
        if line:
            tokens.append(f"{name}: {line}")
    return Comparison(after, len(first), tuple(sorted(tokens)), tuple(_surroundings(before, after)))


def _difference(before: list[int], after: list[int]) -> str:
    if before == after:
        return ""
    place = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), None)
    if place is None:
        return f"{len(before)} tokens, then {len(after)}, equal as far as both go"
    return f"token {place} was {before[place]}, is {after[place]}"


def _surroundings(before: Record, after: Record) -> list[str]:
    lines = []
    for key in WATCHED:
        old, new = before.environment.get(key), after.environment.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            names = sorted(old.keys() | new.keys())
            lines += [f"{key}.{n}: {old.get(n)} -> {new.get(n)}" for n in names if old.get(n) != new.get(n)]
        elif old != new:
            lines.append(f"{key}: {old} -> {new}")
    return lines
