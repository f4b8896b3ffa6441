"""Lines of a text that belong together, marked with letters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class FusedGroup:
    """A fused group: `letter` marks its lines, `name` names it, `description` lists its operations."""

    letter: str
    name: str
    description: str


@dataclass(frozen=True)
class FusionMarks:
    """`letters` of each line by its number, from 0 on: none, one, or several where an operation went into several."""

    groups: tuple[FusedGroup, ...] = ()
    letters: Mapping[int, str] | None = None

    def letters_of_line(self, line: int) -> str:
        return (self.letters or {}).get(line, "")
