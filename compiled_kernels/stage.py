"""Define the stages of compiling an operator, for display."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class CompilerStage:
    """One stage of a compilation: its `text`, and `data` (JSON-ready) if the stage has more structure than its text."""

    text: str
    data: Any = None


@dataclass(frozen=True)
class CompilerStages:
    """The stages of one compilation. `artifact` is the content hash of the code that ran (or would run, for a backend
    that is only compiled ahead of time here); `note` describes it."""

    artifact: str
    note: str
    stages: Mapping[str, CompilerStage] = field(default_factory=dict)
