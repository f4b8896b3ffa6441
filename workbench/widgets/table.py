"""Draw a table within a picture."""

from __future__ import annotations

from collections.abc import Sequence

from workbench import svg
from workbench.display import Table

STYLE = (
    ".wb-pic table{border-collapse:collapse;margin:4px 0;border:0;font:inherit;color:inherit}"
    ".wb-pic table tr{background:none!important}"
    ".wb-pic :is(th,td){border:0;padding:1px 18px 1px 0;background:none;text-align:left;vertical-align:top;"
    "font-size:12px;font-weight:400}"
    ".wb-pic thead th{font-size:11px;opacity:.75}"
    ".wb-pic .n{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}"
)


def draw_table(headings: Sequence[str], rows: Sequence[Sequence[object]], left: Sequence[str] = ()) -> str:
    """Draw a table from rows of texts, or of markup (cells with `__html__`). The first column and the columns in `left`
    are left-aligned, all others right-aligned."""
    return svg.tag("style", STYLE) + Table("", rows, headings, left=left).markup()
