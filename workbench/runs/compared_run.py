"""Represent a run, or one variant of it, with its settings, figures and repetitions, ready to be compared.

Compared runs are labelled by the settings that differ between them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from workbench.errors import WorkbenchError
from workbench.files import UnreadableText, read_json_object
from workbench.runs.locations import find_runs
from workbench.runs.measures import learn_measures
from workbench.runs.metrics import TABLES, round_metrics
from workbench.runs.record import Record
from workbench.runs.rows import COMPLETE, RunRow, run_rows, variant_rows

NOT_COMPARED = ("variants", "question", "judge", "sweep")  # entries that are not engine settings
Figures = dict[str, float]
SEED = "seed"
EMPTY_VALUES = {"null", "false", "[]", "{}"}


@dataclass(frozen=True)
class ComparedRun:
    """One run or one variant: `settings` by dotted path, and `figures` under the names that a listing uses.

    `contention` is the fraction of processor time that other processes used.
    """

    run: str
    variant: str | None
    settings: Mapping[str, Any]
    environment: Mapping[str, str]
    figures: Figures
    contention: float | None
    path: str = field(repr=False)

    @property
    def name(self) -> str:
        return f"{self.run}:{self.variant}" if self.variant else self.run

    @cached_property
    def rounds(self) -> dict[Hashable, Figures]:
        """Return the figures of each round, computed from raw timestamps, by run and round. If rounds are not recorded,
        the run counts as a single round.
        """
        folder = Path(self.path)
        if not folder.is_dir() or not all((folder / f"{name}.parquet").is_file() for name in TABLES):
            return {}
        tables = {name: Record.open(folder).read_table(f"{name}.parquet") for name in TABLES}
        if any("round" not in table.column_names for table in tables.values()):
            return {}
        rows = {name: _variant_rows(table, self.variant) for name, table in tables.items()}
        turns = dict.fromkeys(row["round"] for row in rows["requests"])
        return {
            (self.path, turn): round_metrics(*([row for row in rows[name] if row["round"] == turn] for name in TABLES))
            for turn in turns
        }

    def samples(self, measure: str) -> dict[Hashable, float]:
        """Return the values of a measure by repetition, or only the run's own figure if there are no repetitions."""
        found = {turn: figures.get(measure) for turn, figures in self.rounds.items()}
        known = {turn: value for turn, value in found.items() if value is not None}
        if known and len(known) == len(found):
            return known
        return {(self.path, 0): self.figures[measure]} if measure in self.figures else {}


def find_compared_runs(name: str) -> list[ComparedRun]:
    """Return the runs named by `RUN`, `RUN:VARIANT` or a folder of runs, with each variant of a run separately.

    Raises:
        WorkbenchError: if there is no run, or a run is incomplete; the message has the reason.
    """
    path, variant = _split(name)
    rows = run_rows(find_runs(path))
    if not rows:
        raise WorkbenchError(f"{path}: holds no run; `workbench runs {path}` lists what there is")
    for row in rows:
        if row.state != COMPLETE:
            raise WorkbenchError(f"{row.path}: {row.state}; it cannot be compared")
        if os.path.isdir(row.path):
            Record.open(row.path)  # raises if files were lost in copying
    found = [_compared_run(row) for row in variant_rows(rows)]
    if variant is None:
        return found
    chosen = [item for item in found if item.variant == variant]
    if not chosen:
        here = ", ".join(repr(item.variant) for item in found if item.variant) or "none"
        raise WorkbenchError(f"{name}: no variant {variant!r} there; it has {here}")
    return chosen


def _split(name: str) -> tuple[str, str | None]:
    """Split `RUN:VARIANT`. Both may contain colons: the path is the longest prefix that exists."""
    pieces = name.split(":")
    for count in range(len(pieces), 0, -1):
        path = ":".join(pieces[:count])
        if os.path.exists(path):
            return path, ":".join(pieces[count:]) or None
    raise WorkbenchError(f"{name}: no such run; name a run folder or a record, and `:VARIANT` for one of its variants")


def _compared_run(row: RunRow) -> ComparedRun:
    try:
        experiment, environment, summary = (
            read_json_object(text or "{}") for text in (row.experiment, row.environment, row.summary)
        )
    except UnreadableText as error:
        raise WorkbenchError(f"{row.path}: damaged ({error}); copy it again, or run it again") from None
    learn_measures(summary)
    settings = dict(flatten({name: value for name, value in experiment.items() if name not in NOT_COMPARED}, "."))
    figures = {
        name: float(value) for name, value in flatten(summary, "_")
        if isinstance(value, int | float) and not isinstance(value, bool)
    }  # fmt: skip
    cpu, commit = environment.get("cpu") or {}, environment.get("commit") or {}
    origin = {
        "machine": ", ".join([*(environment.get("gpu") or ()), str(cpu.get("model")), f"{cpu.get('cores')} cores"]),
        "commit": str(commit.get("hash"))[:10] + ("+changes" if commit.get("dirty") else ""),
        "torch": str((environment.get("packages") or {}).get("torch")),
    }
    return ComparedRun(row.run, row.variant, settings, origin, figures, summary.get("others_cpu_share"), row.path)


def flatten(values: Mapping[str, Any], separator: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, separator, f"{prefix}{name}{separator}")
        else:
            yield f"{prefix}{name}", value


def _variant_rows(table: pa.Table, variant: str | None) -> list[dict[str, Any]]:
    rows = table.to_pylist()
    return [row for row in rows if row.get("variant") == variant]


def label_runs(items: Sequence[ComparedRun]) -> list[str]:
    """Return a label for each run: the settings in which it differs from the first run.

    The first run's label has the settings that other runs change. Equal labels are extended by the variant's name, then
    the environment, then the run's name. A setting that is missing in a record (of an older version) does not count as
    different.
    """
    settings = [_as_texts(item.settings) for item in items]
    base, names = settings[0], _differing(settings)
    found = [_label({name: base[name] for name in names if name in base and base[name] not in EMPTY_VALUES})]
    for each in settings[1:]:
        found.append(_label({name: each[name] for name in names if name in each and each[name] != base.get(name)}))
    for finer in ([item.variant or "" for item in items], _environment_labels(items), [item.name for item in items]):
        twice = {label for label in found if not label or found.count(label) > 1}
        found = [f"{label} {more}".strip() if label in twice else label
                 for label, more in zip(found, finer, strict=True)]  # fmt: skip
    return found


def _label(settings: dict[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in settings.items())


def repetition_key(item: ComparedRun) -> str:
    """Return a key that is equal for runs that repeat each other: the settings without seeds, and the environment."""
    kept = {name: value for name, value in item.settings.items() if name.split(".")[-1] != SEED}
    return json.dumps([kept, dict(item.environment), item.variant], sort_keys=True, default=str)


def _environment_labels(items: Sequence[ComparedRun]) -> list[str]:
    around = [dict(item.environment) for item in items]
    names = _differing(around)
    return [_label({name: each[name] for name in names}) for each in around]


def _differing(values: Sequence[dict[str, str]]) -> list[str]:
    names = dict.fromkeys(name for each in values for name in each)
    return [name for name in names if len({each[name] for each in values if name in each}) > 1]


def _as_texts(settings: Any) -> dict[str, str]:
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in settings.items()}
