"""Make the table of events: every kind that a runner emits, with its fields and its description."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from workbench.display import Table
from workbench.trace import events


def kinds() -> Iterator[type[events.Event]]:
    """Yield the classes of events in the order of their definition."""
    for value in vars(events).values():
        if isinstance(value, type) and issubclass(value, events.Event) and value is not events.Event:
            yield value


def events_table(root: Path) -> str:
    """Return a Markdown table of all kinds of events."""
    common = {field.name for field in dataclasses.fields(events.Event)}
    rows = []
    for kind in kinds():
        fields = [f"`{field.name}`" for field in dataclasses.fields(kind) if field.name not in common]
        doc = kind.__doc__ or ""
        says = "" if doc.startswith(f"{kind.__name__}(") else " ".join(doc.split("\n\n")[0].split())
        rows.append((f"`{kind.kind}`", says, ", ".join(fields)))
    return Table("", rows, ("kind", "says", "fields")).markdown()
