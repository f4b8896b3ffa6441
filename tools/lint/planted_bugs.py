"""Check that the bugs of `python -m tools.planted_bugs` still apply to the tree; whether tests catch them is not run
here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.lint.tree import ROOT
from tools.planted_bugs import BUGS, PlantedBug, problems


def faults(root: Path = ROOT, bugs: Sequence[PlantedBug] = BUGS) -> Iterator[str]:
    """Yield bugs whose old text does not occur exactly once, whose new text is not valid Python, or whose tests are
    gone."""
    yield from (f"tools/planted_bugs/bugs.py:1: {problem}; plant it anew" for problem in problems(root, bugs))
