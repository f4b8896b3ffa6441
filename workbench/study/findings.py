"""Result of measuring the variants of an experiment."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Rows = list[dict[str, Any]]


@dataclass
class VariantResults:
    """Measured variants: one row each in `rows`, the inputs in `metadata`, the raw data behind the rows in `tables`."""

    rows: Rows
    metadata: dict[str, Any]
    tables: dict[str, Rows] = field(default_factory=dict, repr=False)
