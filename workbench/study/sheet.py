"""A small table as a value: a terminal and a page draw the same."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sheet:
    """Headings, rows of texts, and words below them. Columns named in `left` hold words, the others numbers; the first
    always holds names."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""
    left: tuple[str, ...] = ()

    def is_left(self, column: int) -> bool:
        return column == 0 or self.headings[column] in self.left


@dataclass(frozen=True)
class Remark:
    """A line to be known. `serious` where figures are not to be trusted, or something failed."""

    text: str
    serious: bool = False
