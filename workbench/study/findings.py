"""What a comparison of variants found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Rows = list[dict[str, Any]]


@dataclass
class Findings:
    """`rows`: one a variant; `about`: what was read or asked; `tables`: what the rows are made from."""

    rows: Rows
    about: dict[str, Any]
    tables: dict[str, Rows] = field(default_factory=dict, repr=False)
