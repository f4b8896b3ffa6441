"""Turn rows of JSON texts into a table: settings by dotted path, measures by name, read by DuckDB."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from typing import Any

import duckdb
import pyarrow as pa

from workbench.runs.rows import COMPLETE, RunRow

COLUMN_TYPES = {
    "UBIGINT": "BIGINT",
    "JSON": "VARCHAR",
    "NULL": "VARCHAR",
}  # signed, since differences may be negative; mixed types become text
NOT_SETTINGS, NOT_MEASURES = {"variants", "question"}, {"verdicts", "verdict", "question", "date"}
Structures = Mapping[str, Any]  # keys and DuckDB types of each part
ROWS_PER_CHUNK = 512  # rows of one DuckDB query
PARTS = {"experiment": "e", "environment": "v", "summary": "s"}
LEADING_COLUMNS = {
    "run": "run",
    "variant": "variant",
    "date": "try_cast(coalesce(v ->> '$.date', s ->> '$.date') AS TIMESTAMPTZ)::TIMESTAMP",
    "question": "coalesce(e ->> '$.question', s ->> '$.question')",
    "model": "coalesce(e ->> '$.model.name', e ->> '$.model', s ->> '$.model.name')",
    "backend": "coalesce(s ->> '$.backend.name', s ->> '$.backend', e ->> '$.backend_used', e ->> '$.backend')",
    "machine": "coalesce(v ->> '$.gpu[0]', (v ->> '$.cpu.model') || ', ' || (v ->> '$.cpu.usable_cores') || ' cores')",
    "verdict": "coalesce(s ->> '$.verdict', nullif(array_to_string(list_sort(list_distinct("
    "json_extract_string(s, '$.verdicts[*].outcome'))), ', '), ''))",
    "state": "state",
    "path": "path",
}


def _arrow(rows: Sequence[RunRow]) -> pa.Table:
    names = [field.name for field in fields(RunRow)]
    made = pa.table({name: pa.array([getattr(row, name) for row in rows], pa.string()) for name in names})
    return pa.Table.from_batches(made.to_batches(max_chunksize=ROWS_PER_CHUNK), made.schema)


def infer_structures(rows: Sequence[RunRow]) -> tuple[pa.Table, Structures]:
    """Return the rows as an Arrow table, and the keys and types of each part.

    A part that is not valid JSON is left out of its row, and the row's `state` reports it.
    """
    whole, table = list(rows), _arrow(rows)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        found = dict(zip(PARTS, threads.map(_structure, [table[part] for part in PARTS]), strict=True))
    for part, (_, damaged) in found.items():
        for index in damaged:
            state = f"damaged: {part}.json cannot be read" if rows[index].state == COMPLETE else rows[index].state
            whole[index] = replace(whole[index], **{"state": state, part: None})
    structures = {part: structure for part, (structure, _) in found.items()}
    return _arrow(whole) if any(damaged for _, damaged in found.values()) else table, structures


def _structure(texts: pa.ChunkedArray) -> tuple[Any, list[int]]:
    """Return keys and types over all texts, and the indices of texts that are not valid JSON.

    Texts are read in chunks: DuckDB frees memory at the end of a query, and allocating it for 10,000 texts takes longer
        than reading them.
    """
    structure: Any = {}
    damaged: list[int] = []
    start = 0
    with duckdb.connect() as connection:
        for chunk in texts.chunks:
            connection.register("texts", pa.table({"text": chunk}))
            try:
                [[found]] = connection.execute("SELECT json_group_structure(text::JSON) FROM texts").fetchall()
            except duckdb.Error:
                asked = "SELECT json_group_structure(try_cast(text AS JSON)), list(json_valid(text)) FROM texts"
                [[found, valid]] = connection.execute(asked).fetchall()
                damaged += [start + index for index, whole in enumerate(valid) if whole is False]
            structure = merge_structures(structure, json.loads(found or "{}"))
            start += len(chunk)
    return structure if isinstance(structure, dict) else {}, damaged


def merge_structures(one: Any, other: Any) -> Any:
    """Return a structure of keys and DuckDB types that covers the rows of both given structures."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one | {
            key: merge_structures(one[key], inside) if key in one else inside for key, inside in other.items()
        }
    if one == other or other == "NULL" or other == {}:
        return one
    if one == "NULL" or one == {}:
        return other
    numbers = {"UBIGINT", "BIGINT", "DOUBLE"}
    both = {each for each in (one, other) if isinstance(each, str)}
    return "JSON" if len(both) < 2 or not both <= numbers else "DOUBLE" if "DOUBLE" in both else "BIGINT"


def select_columns(source: str, structures: Structures) -> tuple[str, list[str]]:
    """Return the SQL that selects every column from the rows in `source`, and the columns' names.

    Args:
        source: the table's name in SQL.
        structures: keys and types of each part, from `infer_structures`.
    """
    made = {f'"{name}"': how for name, how in LEADING_COLUMNS.items()}
    parsed, taken = [], {name.lower() for name in LEADING_COLUMNS}
    for part, short in PARTS.items():
        structure = _column_structure(structures[part])
        skipped = {"experiment": NOT_SETTINGS, "summary": NOT_MEASURES}.get(part, set())
        structure = {key: value for key, value in structure.items() if key not in skipped}
        if not structure:
            continue
        parsed.append(f"from_json({part}, {_quote_text(json.dumps(structure))}) AS {short}{short}")
        for path in _leaves(structure):
            name = {"experiment": ".", "summary": "_"}.get(part, ".").join(path)
            name = f"environment.{name}" if part == "environment" else name
            if name.lower() in taken:
                name = f"{'setting' if part == 'experiment' else part}.{name}"
            if name.lower() not in taken:
                taken.add(name.lower())
                made[quote_identifier(name)] = f"{short}{short}." + ".".join(map(quote_identifier, path))
    inner = ", ".join(["run", "variant", "path", "state", *(f"{p} AS {s}" for p, s in PARTS.items()), *parsed])
    columns = ", ".join(f"{how} AS {name}" for name, how in made.items())
    names = [name[1:-1].replace('""', '"') for name in made]
    return f"SELECT {columns} FROM (SELECT {inner} FROM {source})", names


def _column_structure(structure: Any) -> Any:
    """Return the part of a structure that becomes columns: values and lists of values.

    Of names that differ only in case, the first is taken.
    """
    if not isinstance(structure, dict):
        return {}
    kept: dict[str, Any] = {}
    seen: set[str] = set()
    for key, value in structure.items():
        inside = _column_structure(value) if isinstance(value, dict) else value
        if isinstance(value, list):
            inside = [COLUMN_TYPES.get(value[0], value[0])] if value and isinstance(value[0], str) else None
        elif isinstance(value, str):
            inside = COLUMN_TYPES.get(value, value)
        if inside and key and key.lower() not in seen:
            seen.add(key.lower())
            kept[key] = inside
    return kept


def _leaves(structure: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for key, value in structure.items():
        if isinstance(value, dict):
            yield from ((key, *rest) for rest in _leaves(value))
        else:
            yield (key,)


def quote_identifier(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _quote_text(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
