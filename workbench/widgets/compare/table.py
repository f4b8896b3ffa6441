"""Draw the compared runs as a sortable HTML table, and as an SVG to be saved."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from workbench import svg
from workbench.display import format_cell
from workbench.svg import truncate_to_width
from workbench.widgets.compare.data import SETTING, FigureColumn, FigureTable

MISSING = "missing"
STYLE = (
    ".wb-figure-table{border-collapse:collapse;font-variant-numeric:tabular-nums}"
    ".wb-figure-table :is(th,td){padding:3px 10px;text-align:right;white-space:nowrap;font-weight:400;"
    "border-bottom:1px solid var(--jp-border-color2,rgba(128,128,128,.35));background:none}"
    ".wb-figure-table thead th{vertical-align:bottom}"
    ".wb-figure-table th:first-child{text-align:left;white-space:normal;overflow-wrap:anywhere;min-width:11em}"
    ".wb-figure-table [role=button]{cursor:pointer;display:inline-block}.wb-figure-table .unit{opacity:.7}"
    ".wb-figure-table .ratio{border-left:0;opacity:.85}.wb-figure-table .none{font-style:italic;opacity:.62}"
    ".wb-figure-table tr.baseline :is(th,td){font-weight:600}"
)
ARROWS = {"ascending": " ▲", "descending": " ▼", "none": ""}
ROW_HEIGHT, MARGIN, COLUMN_WIDTH = 22, 10, 110
BOLD_WIDTH = 7.4  # pixels of a bold letter


def draw_table(table: FigureTable, sort_by: str = "", descending: bool = False, note: str = "") -> str:
    """Draw the table as HTML; its column heads are buttons with keys `sort:COLUMN`, with `aria-sort`."""
    order = {sort_by: "descending" if descending else "ascending"}
    shown = table.sorted(sort_by, descending)
    heads = [_head(SETTING, SETTING, "", order), *(_head(c.key, c.key, c.unit, order) for c in table.columns)]
    rows = []
    for row in shown.rows:
        first = f'<th scope="row">{escape(row.label)}{" (baseline)" if row.is_baseline else ""}</th>'
        cells = "".join(map(_cell, table.columns, row.figures))
        mark = ' class="baseline"' if row.is_baseline else ""
        rows.append(f"<tr{mark}>{first}{cells}</tr>")
    caption = f"Figures beside their ratio to {table.baseline}"
    return svg.html(
        f"<style>{STYLE}</style>", '<div style="overflow-x:auto">',
        f'<table class="wb-figure-table"><caption style="text-align:left">{escape(caption)}</caption>',
        f"<thead><tr>{''.join(heads)}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>",
        f"<p>{escape(note)}</p>" if note else "",
    )  # fmt: skip


def _head(key: str, name: str, unit: str, order: dict[str, str]) -> str:
    way = order.get(key, "none")
    label = escape(name) + (f' <span class="unit">[{escape(unit)}]</span>' if unit else "")
    arrow = f'<span aria-hidden="true">{ARROWS[way]}</span>'
    button = f'<span role="button" tabindex="0" data-key="sort:{escape(key)}">{label}{arrow}</span>'
    return f'<th scope="col" aria-sort="{way}">{button}</th>'


def _cell(column: FigureColumn, value: float | None) -> str:
    if value is None:
        return f'<td class="none">{MISSING}</td>'
    return f"<td>{escape(format_figure(column, value))}</td>"


def format_figure(column: FigureColumn, value: float) -> str:
    return f"{value:.3f} ×" if column.ratio else format_cell(value)


def draw_table_image(table: FigureTable, width: float = svg.PICTURE_WIDTH) -> str:
    """Draw the table as SVG, at least `width` pixels wide and as wide as its columns need."""
    left = min(480.0, max(BOLD_WIDTH * (len(row.label) + 11) for row in table.rows) + 2 * MARGIN)
    widths = [max(COLUMN_WIDTH, BOLD_WIDTH * len(column.heading) + 2 * MARGIN) for column in table.columns]
    whole = max(width, left + sum(widths) + MARGIN)
    parts = [svg.text(MARGIN, 18, f"Figures beside their ratio to {table.baseline}", font_weight="bold")]
    parts += _image_row(left, widths, 42, SETTING, [column.heading for column in table.columns], "bold")
    for number, row in enumerate(table.rows, 1):
        y = 42 + ROW_HEIGHT * number
        parts.append(svg.line(MARGIN, y - 15, whole - MARGIN, y - 15, class_="grid"))
        pairs = zip(table.columns, row.figures, strict=True)
        cells = [MISSING if value is None else format_figure(column, value) for column, value in pairs]
        label = f"{row.label} (baseline)" if row.is_baseline else row.label
        parts += _image_row(left, widths, y, truncate_to_width(label, left - MARGIN), cells)
    bottom = 42 + ROW_HEIGHT * len(table.rows) + MARGIN
    return svg.document(whole, bottom, *parts, title=f"figures against {table.baseline}")


def _image_row(
    left: float, widths: list[float], y: float, label: str, cells: list[str], weight: str | None = None
) -> Iterator[str]:
    yield svg.text(MARGIN, y, label, font_weight=weight)
    right = left
    for cell, width in zip(cells, widths, strict=True):
        right += width
        yield svg.text(right, y, cell, text_anchor="end", font_weight=weight)
