"""Format rows for a terminal, Markdown, CSV or JSON; ten thousand rows take no noticeable time."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Sequence
from datetime import date, datetime
from typing import Any

import pyarrow as pa

from workbench.display import Table, truncate_text

MAX_CELL_WIDTH = 48  # characters of a cell in a terminal


def format_table(table: pa.Table, format: str) -> str:
    """Format `table` as table, md, csv or json; csv and json have unrounded values."""
    names = table.column_names
    if format == "json":
        return as_json([{name: _plain(value) for name, value in row.items()} for row in table.to_pylist()])
    columns = [column.to_pylist() for column in table.columns]
    if format == "csv":
        return as_csv(names, zip(*[[_plain(value) for value in column] for column in columns], strict=True))
    cells = list(zip(*[[_short(value) for value in column] for column in columns], strict=True))
    numbers = [pa.types.is_floating(field.type) or pa.types.is_integer(field.type) for field in table.schema]
    return markdown_table(names, cells) if format == "md" else plain_table(names, cells, numbers)


def as_json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def as_csv(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(headings)
    writer.writerows(rows)
    return out.getvalue()


def plain_table(headings: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool] = ()) -> str:
    """Align columns under their headings; those flagged in `right` to the right. (Rich takes 3 s for 10,000 rows.)"""
    lines_of = [[truncate_text(_line(cell), MAX_CELL_WIDTH) for cell in row] for row in rows]
    sides = list(right) or [False] * len(headings)
    widths = [max(map(len, column)) for column in zip(headings, *lines_of, strict=True)] if headings else []
    rule = ["-" * width for width in widths]
    lines = []
    for row in (headings, rule, *lines_of):
        cells = (cell.rjust(w) if side else cell.ljust(w) for cell, w, side in zip(row, widths, sides, strict=True))
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines) + "\n"


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(_line(cell).replace('|', '/') for cell in line)} |\n" for line in lines)


def display_table(title: str, table: pa.Table, note: str = "") -> Table:
    rows = [[_when(value) for value in row.values()] for row in table.to_pylist()]
    return Table(title, rows, table.column_names, note)


def _when(value: Any) -> Any:
    return value.isoformat(" ", "seconds") if isinstance(value, datetime) else value


def _line(cell: str) -> str:
    return " ".join(cell.split()) if "\n" in cell else cell


def _short(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"
    if isinstance(value, datetime):
        return value.isoformat(" ", "seconds")
    return str(value)


def _plain(value: Any) -> Any:
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | list | dict | None) else str(value)
