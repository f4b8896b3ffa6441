"""Levels of the instruction set as a test's parameter: the machine's highest in `make test`, all others in `.ci/run`.

Mark a test with `at_every_level` and give it the argument `level`; it holds itself to that by `limited_to(level)`,
which emulates what the machine lacks. A test of what the processor itself does is marked `at_executed_levels`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from compiled_kernels.level import Level, available_levels


def levels(among: Sequence[Level] = available_levels(), smoke: bool = False) -> list[Any]:
    """Return these levels as parameters, the machine's highest first. All others are of the tier `levels`; with `smoke`
    the lowest of them is its smoke test."""
    found = []
    for level in sorted(among, key=lambda level: -level.rank):
        marks = [] if level in available_levels()[-1:] else [pytest.mark.levels]
        found.append(pytest.param(level, id=str(level), marks=marks))
    if smoke and found:
        found[-1] = pytest.param(*found[-1].values, id=found[-1].id, marks=[*found[-1].marks, pytest.mark.smoke])
    return found


at_executed_levels = pytest.mark.parametrize("level", levels())
at_every_level = pytest.mark.parametrize("level", levels(tuple(Level) if available_levels() else ()))
