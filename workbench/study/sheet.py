"""A small table as a value, drawn alike in a terminal and on a page."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sheet:
    """Headings, rows of texts, and a caption. The first column and those named in `left` hold words, the others
    numbers."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""
    left: tuple[str, ...] = ()

    def is_left(self, column: int) -> bool:
        return column == 0 or self.headings[column] in self.left


@dataclass(frozen=True)
class Remark:
    """A line of remark. `is_warning` marks unreliable numbers or a failure."""

    text: str
    is_warning: bool = False
