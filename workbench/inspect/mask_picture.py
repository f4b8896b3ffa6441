"""Draw pictures of attention masks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

SEEN, SELF, PAPER, LINE = "#3b6ea5", "#1d3c5e", "#ffffff", "#d5dbe3"
MIN_GRID_CELL = 8  # minimum cell size in pixels for grid lines


class MaskPicture(str):
    """A picture as SVG text, which a notebook displays."""

    def _repr_svg_(self) -> str:
        return str(self)


def draw_mask(mask: Callable[[Tensor, Tensor], Tensor], tokens: int = 16, cell: int | None = None) -> MaskPicture:
    """Draw a mask over a text of `tokens` tokens as SVG. Rows are queries, columns are keys; a cell is filled if the
    query sees the key, and dark on the diagonal. `cell` is a cell's side in pixels; by default the picture is about 256
    pixels wide.

    Example: `workbench.draw_mask(workbench.SlidingWindow(8), 24)`
    """
    if tokens < 1:
        raise ValueError(f"a picture needs at least one token, not {tokens}")
    cell = cell or max(1, min(16, 256 // tokens))
    at = torch.arange(tokens)
    seen = mask(at[:, None], at[None]).expand(tokens, tokens).tolist()
    side = tokens * cell
    drawn = [_run(row, start, end, cell, SEEN) for row, cells in enumerate(seen) for start, end in _runs(cells)]
    drawn += [_run(row, row, row + 1, cell, SELF) for row in range(tokens) if seen[row][row]]
    if cell >= MIN_GRID_CELL:
        drawn += [f'<path d="{_lines(tokens, cell)}" stroke="{LINE}" fill="none"/>']
    count = sum(map(sum, seen))
    size = f'width="{side}" height="{side}"'
    return MaskPicture(
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {side} {side}" role="img">'
        f"<title>{tokens} queries (rows) by {tokens} keys (columns): {count} pairs seen</title>"
        f'<rect {size} fill="{PAPER}"/>{"".join(drawn)}</svg>'
    )


def _runs(cells: list[bool]) -> list[tuple[int, int]]:
    """Return [start, end) of each run of consecutive filled cells."""
    found, start = [], None
    for place, filled in enumerate([*cells, False]):
        if filled and start is None:
            start = place
        elif not filled and start is not None:
            found.append((start, place))
            start = None
    return found


def _run(row: int, start: int, end: int, cell: int, fill: str) -> str:
    return f'<rect x="{start * cell}" y="{row * cell}" width="{(end - start) * cell}" height="{cell}" fill="{fill}"/>'


def _lines(tokens: int, cell: int) -> str:
    side, inner = tokens * cell, range(cell, tokens * cell, cell)
    return " ".join([f"M{at} 0V{side}" for at in inner] + [f"M0 {at}H{side}" for at in inner])
