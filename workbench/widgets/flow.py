"""Place pieces side by side, broken into rows that fit a width."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from workbench import svg
from workbench.svg import CHARACTER_WIDTH


def flow(widths: Iterable[float], left: float, right: float) -> list[tuple[float, int]]:
    """Return (x, row) of each piece, placed from `left` to at most `right`; a piece that is too wide gets a row to
    itself."""
    places, x, row = [], left, 0
    for width in widths:
        if x > left and x + width > right:
            x, row = left, row + 1
        places.append((x, row))
        x += width
    return places


def paragraph(content: str, x: float, y: float, width: float, step: float = 15.0, **attributes: object) -> list[str]:
    """Draw a text of font size 11 in lines that fit `width`, the first one at `y` and the next ones `step` apart."""
    lines = textwrap.wrap(content, max(20, int(width / CHARACTER_WIDTH))) or [""]
    return [svg.text(x, y + step * number, line, **attributes) for number, line in enumerate(lines)]
