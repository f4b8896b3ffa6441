"""Stages of compiling an operator, to read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class CompilerStage:
    """`text` to read, and `data` where a stage has more structure than its text (JSON-ready)."""

    text: str
    data: Any = None


@dataclass(frozen=True)
class CompilerStages:
    """The stages of one compilation. `artifact` is the content hash of the code that ran (with a backend that is only
    compiled ahead of time here: that would run); `note` describes it."""

    artifact: str
    note: str
    stages: Mapping[str, CompilerStage] = field(default_factory=dict)
