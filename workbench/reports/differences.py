"""List the differences between two records of one experiment: settings, environment, tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.experiment.experiment import Experiment
from workbench.files import read_yaml
from workbench.runs.record import Record
from workbench.trace.recorder import row_name

VERSION_ENTRIES = ("python", "implementation", "packages", "compiler", "platform", "commit")
HARDWARE_ENTRIES = ("machine", "cpu", "memory_bytes", "gpu")
RUNTIME_ENTRIES = ("threads", "backend")
AGENT_ROUNDS = "agent_rounds.parquet"  # table of the workload measure.agent
DRIFTING_ENTRY = "cpu.frequency_mhz"  # changes from second to second


@dataclass(frozen=True)
class Difference:
    """One value that differs between two records, with its dotted path."""

    path: str
    was: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.path}: {self.was} -> {self.now}"


@dataclass(frozen=True)
class TokenDifference:
    """The first token that differs between two outputs of a request; positions count from 0.

    `was` or `now` is None if that output has ended before the position. `position` is None if only one run has the
    request.
    """

    request: str
    position: int | None
    was: int | None
    now: int | None
    lengths: tuple[int, int]

    def __str__(self) -> str:
        if self.position is None:
            return f"{self.request}: only in one of the runs"
        if self.was is None or self.now is None:
            return f"{self.request}: {self.lengths[0]} tokens, then {self.lengths[1]}, equal up to the shorter's end"
        return f"{self.request}: token {self.position} was {self.was}, is {self.now}"


def setting_differences(before: Record, experiment: Experiment) -> tuple[Difference, ...]:
    """List the settings in which `experiment` differs from the experiment stored in the record.

    Settings that are newer than the record are compared by their defaults.
    """
    try:
        written = read_yaml(before.experiment_text, f"run {before.path}: experiment.yaml")
    except ValueError:
        return ()
    return tuple(leaf_differences(written if isinstance(written, dict) else {}, experiment.model_dump(mode="json")))


def environment_differences(before: Record, after: Record, names: Sequence[str]) -> tuple[Difference, ...]:
    """List the differences between two environments among the entries `names`."""
    was, now = ({name: record.environment.get(name) for name in names} for record in (before, after))
    return tuple(each for each in leaf_differences(was, now) if each.path != DRIFTING_ENTRY)


def output_differences(before: Record, after: Record) -> tuple[TokenDifference, ...]:
    """List the first differing token of each request and sample with different outputs."""
    return token_differences(outputs_of(before), outputs_of(after))


def outputs_of(record: Record) -> list[dict[str, Any]]:
    """Return a row for each output of a run: an output of a request, or an agent's answer to a question."""
    if not (record.path / AGENT_ROUNDS).is_file():
        return record.requests.to_pylist()
    rows = record.read_table(AGENT_ROUNDS).to_pylist()
    names = ("variant", "round", "question", "agent_round")
    return [{**row, "request_id": ", ".join(f"{name} {row[name]}" for name in names)} for row in rows]


def token_differences(
    before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]
) -> tuple[TokenDifference, ...]:
    first, second = ({row_name(dict(row)): row["token_ids"] for row in rows} for rows in (before, after))
    found = []
    for name in sorted(first.keys() | second.keys()):
        was, now = first.get(name), second.get(name)
        if was is None or now is None:
            found.append(TokenDifference(name, None, None, None, (len(was or ()), len(now or ()))))
        elif was != now:
            place = next((i for i, (a, b) in enumerate(zip(was, now, strict=False)) if a != b), min(len(was), len(now)))
            old, new = (ids[place] if place < len(ids) else None for ids in (was, now))
            found.append(TokenDifference(name, place, old, new, (len(was), len(now))))
    return tuple(found)


def leaf_differences(before: Any, after: Any, path: str = "") -> list[Difference]:
    """List the differences between two nested values, each with the dotted path of the innermost value."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        names = [*before, *(name for name in after if name not in before)]
        return [
            each
            for name in names
            for each in leaf_differences(before.get(name), after.get(name), f"{path}.{name}" if path else str(name))
        ]
    return [] if before == after else [Difference(path, before, after)]
