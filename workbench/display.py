"""Tables of values: rendered for notebooks, pages, terminals, Markdown and CSV. Rich is imported where it is used."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime
from html import escape
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table as RichTable
    from rich.text import Text

# Variables of JupyterLab's themes, each with a fallback that is readable on light and dark pages.
STYLE = (
    "<style>.wb-shown{color:var(--jp-content-font-color1,inherit);font:13px/1.45 var(--jp-ui-font-family,system-ui,"
    "sans-serif);margin:2px 0;overflow-x:auto}"
    ".wb-shown table{border-collapse:collapse;margin:0 0 4px;font-size:12px}"
    ".wb-shown .title{font-weight:600;padding:2px 0 4px}"
    ".wb-shown table thead tr,.wb-shown table tbody tr:nth-child(n){background:none}"
    ".wb-shown th,.wb-shown td{text-align:left!important;vertical-align:top;padding:2px 14px 2px 0;max-width:60em;"
    "border-bottom:1px solid var(--jp-border-color2,rgba(128,128,128,.35));white-space:pre-wrap;"
    "overflow-wrap:break-word;color:inherit}"
    ".wb-shown th{font-weight:500;color:var(--jp-content-font-color2,inherit);white-space:nowrap}"
    ".wb-shown .n{text-align:right!important;font-variant-numeric:tabular-nums;white-space:nowrap}"
    ".wb-shown .note{color:var(--jp-content-font-color2,inherit);font-size:12px;margin:2px 0}"
    ".wb-shown summary{cursor:pointer;color:var(--jp-content-link-color,inherit);font-size:12px}"
    ".wb-shown pre{font:12px/1.4 var(--jp-code-font-family,monospace);margin:4px 0;background:none;color:inherit}"
    ".wb-shown figure{display:inline-block;margin:4px 12px 4px 0;vertical-align:top}"
    ".wb-shown figcaption{font-size:11px;color:var(--jp-content-font-color2,inherit)}"
    ".wb-shown img{display:block;image-rendering:pixelated;max-width:100%}</style>"
)
MAX_TABLE_ROWS = 40  # maximum number of shown rows
MAX_CELL_CHARACTERS = 88  # maximum characters of a cell in a terminal


@dataclass(frozen=True)
class Table:
    """A table of `rows` below `headings`, for a notebook, a page, a terminal, Markdown and CSV.

    Args:
        title: a line above the table; none if empty.
        rows: cells, formatted by `format_cell`. A cell with `__html__` is markup on a page, a `rich.text.Text` has its
            style in a terminal.
        headings: names of the columns; without them the first cell of each row is its heading.
        note: a remark below the table.
        left: left-aligned text columns, besides the first; all others are right-aligned numbers. By default a column is
            right-aligned if all its cells are numbers.
        subtables: tables below this one, in a notebook and as plain text.
        collapsed: tables, or (title, text) pairs, that a notebook hides until clicked; other outputs leave them out.
    """

    title: str
    rows: Sequence[Sequence[object]]
    headings: Sequence[str] = ()
    note: str = ""
    left: Sequence[str] | None = None
    subtables: Sequence[Table] = ()
    collapsed: Sequence[Table | tuple[str, str]] = ()

    @classmethod
    def from_dicts(cls, rows: Sequence[Mapping[str, object]]) -> Table:
        """Make a table of all keys in order of appearance; a missing value is None."""
        names = list(dict.fromkeys(name for row in rows for name in row))
        return cls("", [[row.get(name) for name in names] for row in rows], names)

    @property
    def numeric(self) -> list[bool]:
        """Return, for each column, whether it is right-aligned."""
        if self.left is not None:
            return [place > 0 and name not in self.left for place, name in enumerate(self.headings)]
        if not self.headings or not self.rows:
            return [False] * len(self.rows[0] if self.rows else self.headings)
        columns = ([cell for cell in column if cell is not None] for column in zip(*self.rows, strict=True))
        return [bool(cells) and all(map(_is_number, cells)) for cells in columns]

    def html(self) -> str:
        return f'<div class="wb-shown">{STYLE}{self.markup(MAX_TABLE_ROWS)}</div>'

    def markup(self, max_rows: int | None = None) -> str:
        """Return the table as HTML for a page that has its own styles: class `n` marks numbers, `note` and `title` mark
        the remark and the title.
        """
        marks = [' class="n"' if right else "" for right in self.numeric]
        head = "".join(f"<th{mark}>{escape(name)}</th>" for name, mark in zip(self.headings, marks, strict=False))
        lines = []
        for row in self.rows[:max_rows]:
            cells = [f"<td{mark}>{_cell_markup(cell)}</td>" for cell, mark in zip(row, marks, strict=True)]
            if cells and not self.headings:
                cells[0] = f"<th>{_cell_markup(row[0])}</th>"
            lines.append(f"<tr>{''.join(cells)}</tr>")
        markup = f'<div class="title">{escape(self.title)}</div>' if self.title else ""
        if lines:
            head = head and f"<thead><tr>{head}</tr></thead>"
            markup += f"<table>{head}<tbody>{''.join(lines)}</tbody></table>"
        markup += "".join(f'<div class="note">{escape(note)}</div>' for note in self._notes(max_rows))
        markup += "".join(table.markup(max_rows) for table in self.subtables)
        return markup + "".join(map(_fold, self.collapsed))

    def text(self, max_rows: int | None = MAX_TABLE_ROWS, max_characters: int = MAX_CELL_CHARACTERS) -> str:
        """Return aligned plain text, each row on one line (quick: rich takes 3 s for 10,000 rows)."""
        rows = [*[self.headings] * bool(self.headings), *self.rows[:max_rows]]
        cells = [[truncate_text(_one_line(cell), max_characters) for cell in row] for row in rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        if self.headings:
            cells.insert(1, ["-" * width for width in widths])
        lines, numeric = [self.title] if self.title else [], self.numeric
        for row in cells:
            sides = zip(row, widths, numeric, strict=True)
            lines.append("  ".join(c.rjust(w) if right else c.ljust(w) for c, w, right in sides).rstrip())
        return "\n".join([*lines, *self._notes(max_rows), *(f"\n{table.text()}" for table in self.subtables)])

    def __str__(self) -> str:
        return self.text()

    def rich(self, no_wrap: bool = False) -> RichTable:
        """Return the grid for a rich console, which fits it to the terminal's width. Text in cells is shown as it is,
        not parsed as markup.
        """
        from rich.table import Table as RichTable
        from rich.text import Text

        made = RichTable(pad_edge=False)
        for name, right in zip(self.headings, self.numeric, strict=True):
            made.add_column(Text(name), justify="right" if right else "left", no_wrap=no_wrap)
        for row in self.rows:
            made.add_row(*(cell if isinstance(cell, Text) else Text(format_cell(cell)) for cell in row))
        return made

    def __rich_console__(self, console: object, options: object) -> Iterator[RichTable | Text]:
        from rich.text import Text

        yield from [Text(self.title, style="bold")] * bool(self.title)
        yield self.rich()
        yield from [Text(self.note, style="dim")] * bool(self.note)

    def markdown(self) -> str:
        names = self.headings or [""] * len(self.rows[0] if self.rows else ())
        lines = [[_markdown_cell(cell) for cell in row] for row in (names, *self.rows)]
        lines.insert(1, ["---"] * len(names))
        title, note = f"**{_one_line(self.title)}**\n\n" if self.title else "", f"\n{self.note}\n" if self.note else ""
        return title + "".join(f"| {' | '.join(line)} |\n" for line in lines) + note

    def csv(self) -> str:
        """Return the rows as CSV with unrounded values; every text is read back unchanged."""
        lines: list[str] = []
        # Lines end with \r\n up to here, so the writer quotes cells that contain either character.
        file: Any = SimpleNamespace(write=lambda line: lines.append(line.removesuffix("\r\n") + "\n"))
        writer = csv.writer(file)
        writer.writerows([self.headings] * bool(self.headings))
        writer.writerows([plain_value(cell) for cell in row] for row in self.rows)
        return "".join(lines)

    def _notes(self, max_rows: int | None) -> list[str]:
        hidden = 0 if max_rows is None else len(self.rows) - max_rows
        return [note for note in (f"and {hidden:,} more" if hidden > 0 else "", self.note) if note]


class Displayable:
    """Base class of values that are shown as a table by Jupyter, IPython, `print` and a rich console; `repr` is
    unchanged.
    """

    __slots__ = ()

    def _display_table(self) -> Table:
        raise NotImplementedError

    def _repr_html_(self) -> str:
        return self._display_table().html()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text("..." if cycle else self._display_table().text())

    def __str__(self) -> str:
        return self._display_table().text()

    def __rich_console__(self, console: object, options: object) -> Iterator[Table]:
        yield self._display_table()


def format_cell(value: object) -> str:
    """Format a value as the text of a table cell."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"
    if isinstance(value, datetime):
        return value.isoformat(" ", "seconds")
    if isinstance(value, list | tuple):
        return ", ".join(map(format_cell, value))
    if isinstance(value, dict):
        return ", ".join(f"{key}: {format_cell(inner)}" for key, inner in value.items())
    return str(value)


def truncate_text(text: str, max_characters: int) -> str:
    """Truncate `text` to `max_characters` characters, the last of them an ellipsis."""
    return text if len(text) <= max_characters else text[: max_characters - 1] + "…"


def format_ranges(numbers: Iterable[int]) -> str:
    """Format whole numbers as ranges: 0, 1, 2, 3, 4, 6 become `0-4, 6`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def plain_value(value: Any) -> Any:
    """Convert a value for JSON and CSV: a date to ISO 8601, a non-finite number to None, other objects to text."""
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | list | dict | None) else str(value)


def _is_number(cell: object) -> bool:
    return isinstance(cell, int | float) and not isinstance(cell, bool)


def _cell_markup(cell: Any) -> str:
    return cell.__html__() if hasattr(cell, "__html__") else escape(format_cell(cell))


def _fold(what: Table | tuple[str, str]) -> str:
    if isinstance(what, Table):
        title, body = what.title, replace(what, title="").markup(MAX_TABLE_ROWS)
    else:
        title, body = what[0], f"<pre>{escape(what[1])}</pre>"
    return f"<details><summary>{escape(title)}</summary>{body}</details>"


def _one_line(cell: object) -> str:
    text = format_cell(cell)
    return text if text.splitlines() == [text] else " ".join(text.split())


def _markdown_cell(cell: object) -> str:
    """Escape pipes, and backslashes that would escape the escape."""
    return re.sub(r"(\\*)\|", r"\1\1\\|", " ".join(format_cell(cell).split()))
