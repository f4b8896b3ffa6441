"""Arguments of functions: names and types."""

from __future__ import annotations

from typing import NamedTuple


class Named(NamedTuple):
    """A value by its name, and its type as MLIR spells it."""

    name: str
    type: str


def indices(*names: str) -> list[Named]:
    """Return arguments that are indices."""
    return [Named(name, "index") for name in names]
