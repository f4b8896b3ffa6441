"""Display values as small tables: HTML in a notebook, text in a terminal. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

# Variables of JupyterLab's themes, each with what reads on light and on dark where there are none.
STYLE = (
    "<style>.wb-shown{color:var(--jp-content-font-color1,inherit);font:13px/1.45 var(--jp-ui-font-family,system-ui,"
    "sans-serif);margin:2px 0;overflow-x:auto}"
    ".wb-shown table{border-collapse:collapse;margin:0 0 4px;font-size:12px}"
    ".wb-shown .title{font-weight:600;padding:2px 0 4px}"
    ".wb-shown table thead tr,.wb-shown table tbody tr:nth-child(n){background:none}"
    ".wb-shown th,.wb-shown td{text-align:left!important;vertical-align:top;padding:2px 14px 2px 0;max-width:60em;"
    "border-bottom:1px solid var(--jp-border-color2,rgba(128,128,128,.35));white-space:pre-wrap;"
    "overflow-wrap:anywhere;color:inherit}"
    ".wb-shown th{font-weight:500;color:var(--jp-content-font-color2,inherit);white-space:nowrap}"
    ".wb-shown td.n{text-align:right!important;font-variant-numeric:tabular-nums}"
    ".wb-shown .note{color:var(--jp-content-font-color2,inherit);font-size:12px;margin:2px 0}"
    ".wb-shown summary{cursor:pointer;color:var(--jp-content-link-color,inherit);font-size:12px}"
    ".wb-shown pre{font:12px/1.4 var(--jp-code-font-family,monospace);margin:4px 0;background:none;color:inherit}"
    ".wb-shown figure{display:inline-block;margin:4px 12px 4px 0;vertical-align:top}"
    ".wb-shown figcaption{font-size:11px;color:var(--jp-content-font-color2,inherit)}"
    ".wb-shown img{display:block;image-rendering:pixelated;max-width:100%}</style>"
)
MAX_TABLE_ROWS = 40  # rows that are shown
MAX_CELL_CHARACTERS = 88  # letters of a cell in a terminal


@dataclass(frozen=True)
class Table:
    """A table of `rows` below `headings`; without these the first cell of each row is its heading.

    `note` is a remark, `subtables` are tables below it. `collapsed` is hidden until clicked: tables, or texts by their
    titles; a terminal leaves that out.
    """

    title: str
    rows: Sequence[Sequence[object]]
    headings: Sequence[str] = ()
    note: str = ""
    subtables: Sequence[Table] = ()
    collapsed: Sequence[Table | tuple[str, str]] = ()

    def html(self) -> str:
        return f'<div class="wb-shown">{STYLE}{self._inside()}</div>'

    def text(self) -> str:
        lines = [self.title] if self.title else []
        lines += _aligned(
            [list(self.headings)] * bool(self.headings) + [list(row) for row in self.rows[:MAX_TABLE_ROWS]]
        )
        lines += [_more(self.rows)] * (len(self.rows) > MAX_TABLE_ROWS) + [self.note] * bool(self.note)
        return "\n".join([*lines, *(f"\n{table.text()}" for table in self.subtables)])

    def _inside(self) -> str:
        head = "".join(f"<th>{escape(name)}</th>" for name in self.headings)
        body = "".join(f"<tr>{_cells(row, not self.headings)}</tr>" for row in self.rows[:MAX_TABLE_ROWS])
        markup = f'<div class="title">{escape(self.title)}</div>' if self.title else ""
        if self.rows:
            markup += f"<table>{f'<thead><tr>{head}</tr></thead>' if head else ''}<tbody>{body}</tbody></table>"
        notes = [note for note in (_more(self.rows) if len(self.rows) > MAX_TABLE_ROWS else "", self.note) if note]
        markup += "".join(f'<div class="note">{escape(note)}</div>' for note in notes)
        return markup + "".join(table._inside() for table in self.subtables) + "".join(map(_folded, self.collapsed))


class Displayable:
    """A value with a table: Jupyter, IPython and `print` show it; `repr` stays what it is."""

    __slots__ = ()

    def _display_table(self) -> Table:
        raise NotImplementedError

    def _repr_html_(self) -> str:
        return self._display_table().html()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text("..." if cycle else self._display_table().text())

    def __str__(self) -> str:
        return self._display_table().text()


def format_cell(value: object) -> str:
    """Format a value as a table cell."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(format_cell, value))
    if isinstance(value, dict):
        return ", ".join(f"{key}: {format_cell(inner)}" for key, inner in value.items())
    return str(value)


def truncate_text(text: str, max_characters: int) -> str:
    """Truncate `text` to `max_characters` characters, the last of which is an ellipsis then."""
    return text if len(text) <= max_characters else text[: max_characters - 1] + "…"


def format_ranges(numbers: Iterable[int]) -> str:
    """Format 0, 1, 2, 3, 4, 6 as `0-4, 6`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _cells(row: Sequence[object], first: bool) -> str:
    number = (' class="n"' if isinstance(cell, int | float) and not isinstance(cell, bool) else "" for cell in row)
    cells = [
        f"<td{n if not first else ''}>{escape(format_cell(cell))}</td>" for cell, n in zip(row, number, strict=True)
    ]
    if first and cells:
        cells[0] = f"<th>{escape(format_cell(row[0]))}</th>"
    return "".join(cells)


def _folded(what: Table | tuple[str, str]) -> str:
    if isinstance(what, Table):
        title, body = what.title, replace(what, title="")._inside()
    else:
        title, body = what[0], f"<pre>{escape(what[1])}</pre>"
    return f"<details><summary>{escape(title)}</summary>{body}</details>"


def _aligned(rows: Sequence[Sequence[object]]) -> list[str]:
    cells = [[_line(format_cell(cell)) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in cells]


def _line(cell: str) -> str:
    return truncate_text(" ".join(cell.split()) if "\n" in cell else cell, MAX_CELL_CHARACTERS)


def _more(rows: Sequence[object]) -> str:
    return f"and {len(rows) - MAX_TABLE_ROWS:,} more"
