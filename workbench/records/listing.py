"""Make the table of all runs of a folder, from the index and from files that have changed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from workbench.records import columns, index, sql
from workbench.records.index import Index
from workbench.records.places import Place
from workbench.records.rows import Row, rows_by_place

Marks = Mapping[str, tuple[bytes, int]]


def listing(folder: Path, places: Sequence[Place]) -> tuple[pa.Table, list[str]]:
    """Return one row a run with all columns, in the order of `places`, and the columns' names.

    The result is the same whether a current index, an old one or none is there.
    """
    if len(places) < index.FEWEST:
        return _table(_read(places).values())
    now = time.time_ns()  # before any mark is taken
    marks = {place.name: index.mark(place) for place in places}
    settled = [place for place in places if index.settled(place, marks[place.name][1], now)]
    known = index.load(folder)
    if known is not None and not _holds(known, marks):
        known = None
    fresh = settled if known is None else [place for place in settled if place.name not in known.marks]
    if fresh:
        known = (known and _extended(known, fresh, marks)) or _entered(settled, marks)
        if known is not None:
            index.save(folder, known)
    rest = [place for place in places if known is None or place.name not in known.marks]
    whole = known if known is None or not rest else _extended(known, rest, marks)
    if whole is None:
        return _table(_read(places).values())
    return whole.table, whole.names


def _holds(known: Index, marks: Marks) -> bool:
    """Return whether every indexed run still has its fingerprint."""
    return all(name in marks and marks[name][0] == mark for name, mark in known.marks.items())


def _read(places: Sequence[Place]) -> dict[str, Row | None]:
    return dict(zip((place.name for place in places), rows_by_place(places), strict=True))


def _table(rows: Iterable[Row | None]) -> tuple[pa.Table, list[str]]:
    return _made(*columns.looked_at([row for row in rows if row is not None]))


def _made(whole: pa.Table, structures: columns.Structures) -> tuple[pa.Table, list[str]]:
    """Return the rows' columns, by these keys and types, and the columns' names."""
    select, names = columns.select("whole", structures)
    with sql.connect() as connection:
        connection.register("whole", whole)
        return connection.sql(select).to_arrow_table(), names


def _entered(settled: Sequence[Place], marks: Marks) -> Index | None:
    """Return an index of these runs alone, without columns of other runs. None where a part has no keys."""
    rows = _read(settled)
    whole, structures = columns.looked_at([row for row in rows.values() if row is not None])
    if not all(structures.values()):
        return None
    table, names = _made(whole, structures)
    taken = {name: marks[name][0] for name in rows}
    return Index(table, names, structures, taken, frozenset(name for name, row in rows.items() if row is None))


def _extended(known: Index, fresh: Sequence[Place], marks: Marks) -> Index | None:
    """Join the known runs and `fresh` ones; None where these have a key or a type that the index lacks."""
    rows = _read(fresh)
    whole, found = columns.looked_at([row for row in rows.values() if row is not None])
    both = {part: columns.union(structure, found[part]) for part, structure in known.structures.items()}
    if both != known.structures:
        return None
    table, _ = _made(whole, known.structures)
    if table.schema != known.table.schema:
        return None
    names = [name for name in known.marks if name not in known.others] + [n for n, row in rows.items() if row]
    order = np.argsort(np.array(names, dtype=object), kind="stable")
    joined = pa.concat_tables([known.table, table]).take(pa.array(order))
    taken = {**known.marks, **{name: marks[name][0] for name in rows}}
    others = known.others | {name for name, row in rows.items() if row is None}
    return Index(joined, known.names, known.structures, dict(sorted(taken.items())), others)
