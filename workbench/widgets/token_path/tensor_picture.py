"""Draw a matrix [token, column] as a strip of signed shades, with columns combined in bins if it is wide, and the
values of one bin."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from workbench import svg
from workbench.svg import CHARACTER_WIDTH, truncate_to_width
from workbench.units import format_number

ROW, LEFT = 20, 120
MAX_ROWS, MAX_BINS, MIN_BIN_WIDTH, NUMBER_WIDTH = 14, 64, 9, 78


def shade(value: float, largest: float) -> dict[str, object]:
    """Return the fill colour of a signed value: orange above zero, blue below, fainter for smaller magnitudes."""
    if math.isnan(value):
        return {"fill": "currentColor", "fill_opacity": 0.06}
    return {
        "fill": svg.SERIES_COLOURS[5 if value > 0 else 0],
        "fill_opacity": round(min(1.0, abs(value) / (largest or 1.0)) ** 0.7, 2),
    }


@dataclass(frozen=True)
class TensorStrip:
    """A strip that shows `values` [token, column]; the value at `position` and `column` is the chosen one."""

    values: np.ndarray
    tokens: Sequence[str]
    position: int
    column: int
    width: float
    column_names: Sequence[str] = ()
    signed: bool = False  # whether a cell shows its largest number instead of that of largest magnitude

    @cached_property
    def columns_per_bin(self) -> int:
        room = int((self.width - LEFT - 4) / MIN_BIN_WIDTH)
        return -(-self.values.shape[1] // max(1, min(MAX_BINS, room)))

    @property
    def rows(self) -> range:
        """Return the range of visible rows, around the chosen row."""
        end = min(len(self.tokens), max(self.position + 4, MAX_ROWS))
        return range(max(0, end - MAX_ROWS), end)

    @property
    def bin(self) -> range:
        """Return the range of columns in the chosen value's bin."""
        begin = self.column // self.columns_per_bin * self.columns_per_bin
        return range(begin, min(begin + self.columns_per_bin, self.values.shape[1]))

    def draw(self) -> tuple[str, float]:
        """Draw a cell for each token and bin, shaded by the bin's value of largest magnitude; return markup and
        height."""
        columns = self.values.shape[1]
        starts = range(0, columns, self.columns_per_bin)
        wide = min(28.0, (self.width - LEFT - 4) / len(starts))
        shown = self.values[self.rows.start : self.rows.stop]
        largest = float(np.nanmax(np.abs(shown))) if not np.isnan(shown).all() else 1.0
        parts = []
        for line, row in enumerate(self.rows):
            y, chosen = 2 + ROW * line, row == self.position
            name = f"{row} {self.tokens[row]}"
            parts.append(svg.text(LEFT - 8, y + 14, truncate_to_width(name, LEFT - 12), text_anchor="end",
                                  font_weight="bold" if chosen else None, class_="mono"))  # fmt: skip
            for number, begin in enumerate(starts):
                cell = self.values[row, begin : begin + self.columns_per_bin]
                place = self._place(cell)
                here = chosen and begin == self.bin.start
                parts.append(svg.rect(
                    LEFT + wide * number, y, max(wide - 0.5, 0.5), ROW - 1, **shade(float(cell[place]), largest),
                    key=f"b{row}.{begin + place}", tabindex=0 if here else -1, role="button",
                    tip=self._tip(row, begin, cell), data_row="" if not number else None,
                ))  # fmt: skip
        line = self.position - self.rows.start
        parts.append(svg.rect(LEFT - 1, 1 + ROW * line, wide * len(starts) + 1, ROW + 1, **MARK))
        parts.append(svg.rect(LEFT + wide * (self.bin.start // self.columns_per_bin) - 1, ROW * line, wide + 1.5,
                              ROW + 3, **(MARK | {"stroke_width": 2.5})))  # fmt: skip
        height = 2 + ROW * len(self.rows)
        note = f"{columns:,} columns" + (f", {self.columns_per_bin} to a cell" if self.columns_per_bin > 1 else "")
        left = len(self.tokens) - len(self.rows)
        note += f"; {left} more tokens are not shown" if left else ""
        note += f"; orange above zero, blue below, full colour: ±{format_number(largest)}"
        parts.append(svg.text(LEFT, height + 15, note, class_="faint", font_size=11))
        return "".join(parts), height + 24

    def draw_numbers(self, y: float) -> tuple[str, float]:
        """Draw the values of the chosen bin at `y`, each of which can be picked; return markup and height."""
        across = max(1, int((self.width - LEFT) / NUMBER_WIDTH))
        name = f"columns {self.bin.start}–{self.bin.stop - 1}" if len(self.bin) > 1 else f"column {self.column}"
        parts = [svg.text(LEFT - 8, y + 26, name, text_anchor="end", font_size=11)]
        for number, column in enumerate(self.bin):
            x, top = LEFT + NUMBER_WIDTH * (number % across), y + 36 * (number // across)
            value, chosen = float(self.values[self.position, column]), column == self.column
            name = truncate_to_width(self._name(column), NUMBER_WIDTH - 4)
            parts.append(svg.group(
                svg.rect(x, top, NUMBER_WIDTH - 4, 32, rx=3, fill="transparent", stroke="currentColor",
                         stroke_opacity=1 if chosen else 0.3, stroke_width=2 if chosen else 1),
                svg.text(x + 4, top + 12, name, font_size=11, class_="faint"),
                svg.text(x + 4, top + 26, format_number(value), font_weight="bold" if chosen else None),
                key=f"n{column}", tabindex=0 if chosen else -1, role="button",
                tip=f"{self._name(column)}: {value:.6g}", aria_label=f"{self._name(column)}: {value:.4g}",
            ))  # fmt: skip
        return "".join(parts), 36 * -(-len(self.bin) // across) + 4

    def _place(self, cell: np.ndarray) -> int:
        return largest_place(cell, self.signed)

    def _name(self, column: int) -> str:
        return self.column_names[column] if self.column_names else f"column {column}"

    def _tip(self, row: int, begin: int, cell: np.ndarray) -> str:
        if len(cell) == 1:
            return f"token {row} {self.tokens[row]}, {self._name(begin)}: {cell[0]:.6g}"
        some = ", ".join(f"{value:.4g}" for value in cell[:6]) + (", …" if len(cell) > 6 else "")
        return f"token {row} {self.tokens[row]}, columns {begin} to {begin + len(cell) - 1}: {some}"


MARK = {"fill": "none", "stroke": "currentColor", "stroke_width": 1, "pointer_events": "none"}


def largest_place(row: np.ndarray, signed: bool) -> int:
    """Return the index of the largest value in `row` if `signed`, else of the largest magnitude; NaN is skipped."""
    return int(np.argmax(np.nan_to_num(row if signed else np.abs(row), nan=-np.inf)))


def fit_letters(text: str, width: float, size: float = 11) -> bool:
    """Return whether a text of font size `size` fits into `width` pixels."""
    return len(text) * CHARACTER_WIDTH * size / 11 <= width
