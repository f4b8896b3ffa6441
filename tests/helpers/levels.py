"""Levels of the instruction set as a test's parameter: the machine's highest in `make test`, those below in `.ci/run`.

Mark a test with `at_every_level` and give it the argument `level`; it holds itself to that by `limited_to(level)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from compiled_kernels.level import Level, available_levels


def levels(among: Sequence[Level] = available_levels()) -> list[Any]:
    """Return these levels as parameters, the machine's highest first; all others are of the tier `levels`."""
    highest = available_levels()[-1:]
    order = sorted(among, key=lambda level: -level.rank)
    return [pytest.param(level, id=str(level), marks=[] if level in highest else pytest.mark.levels) for level in order]


at_every_level = pytest.mark.parametrize("level", levels())
