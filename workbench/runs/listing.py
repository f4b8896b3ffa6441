"""Build the table of all runs of a folder, from the index and from changed files."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from workbench.runs import columns, index, sql
from workbench.runs.index import RunIndex
from workbench.runs.locations import RunLocation
from workbench.runs.rows import RunRow, rows_by_location

Fingerprints = Mapping[str, tuple[bytes, int]]


def list_runs(folder: Path, places: Sequence[RunLocation]) -> tuple[pa.Table, list[str]]:
    """Return one row per run with all columns, in the order of `places`, and the columns' names.

    The result is the same with a current index, an old one or none.
    """
    if len(places) < index.MIN_INDEXED_RUNS:
        return _table(_read(places).values())
    now = time.time_ns()  # before the first fingerprint
    marks = {place.name: index.file_fingerprint(place) for place in places}
    stable = [place for place in places if index.is_stable(place, marks[place.name][1], now)]
    known = index.load_index(folder)
    if known is not None and not _is_current(known, marks):
        known = None
    fresh = stable if known is None else [place for place in stable if place.name not in known.fingerprints]
    if fresh:
        known = (known and _extended_index(known, fresh, marks)) or _new_index(stable, marks)
        if known is not None:
            index.save_index(folder, known)
    rest = [place for place in places if known is None or place.name not in known.fingerprints]
    whole = known if known is None or not rest else _extended_index(known, rest, marks)
    if whole is None:
        return _table(_read(places).values())
    return whole.table, whole.names


def _is_current(known: RunIndex, marks: Fingerprints) -> bool:
    """Return whether every indexed run still has its fingerprint."""
    return all(name in marks and marks[name][0] == mark for name, mark in known.fingerprints.items())


def _read(places: Sequence[RunLocation]) -> dict[str, RunRow | None]:
    return dict(zip((place.name for place in places), rows_by_location(places), strict=True))


def _table(rows: Iterable[RunRow | None]) -> tuple[pa.Table, list[str]]:
    return _make_columns(*columns.infer_structures([row for row in rows if row is not None]))


def _make_columns(whole: pa.Table, structures: columns.Structures) -> tuple[pa.Table, list[str]]:
    """Build the rows' columns from these keys and types; return them and their names."""
    select, names = columns.select_columns("whole", structures)
    with sql.connect() as connection:
        connection.register("whole", whole)
        return connection.sql(select).to_arrow_table(), names


def _new_index(stable: Sequence[RunLocation], marks: Fingerprints) -> RunIndex | None:
    """Return an index of only these runs, without columns of other runs. None if a part has no keys."""
    rows = _read(stable)
    whole, structures = columns.infer_structures([row for row in rows.values() if row is not None])
    if not all(structures.values()):
        return None
    table, names = _make_columns(whole, structures)
    taken = {name: marks[name][0] for name in rows}
    return RunIndex(table, names, structures, taken, frozenset(name for name, row in rows.items() if row is None))


def _extended_index(known: RunIndex, fresh: Sequence[RunLocation], marks: Fingerprints) -> RunIndex | None:
    """Add the runs `fresh` to an index; None if they have a key or type that the index lacks."""
    rows = _read(fresh)
    whole, found = columns.infer_structures([row for row in rows.values() if row is not None])
    both = {part: columns.merge_structures(structure, found[part]) for part, structure in known.structures.items()}
    if both != known.structures:
        return None
    table, _ = _make_columns(whole, known.structures)
    if table.schema != known.table.schema:
        return None
    names = [name for name in known.fingerprints if name not in known.non_records] + [
        n for n, row in rows.items() if row
    ]
    order = np.argsort(np.array(names, dtype=object), kind="stable")
    joined = pa.concat_tables([known.table, table]).take(pa.array(order))
    taken = {**known.fingerprints, **{name: marks[name][0] for name in rows}}
    others = known.non_records | {name for name, row in rows.items() if row is None}
    return RunIndex(joined, known.names, known.structures, dict(sorted(taken.items())), others)
