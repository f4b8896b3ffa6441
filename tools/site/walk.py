"""Follow one request through the library: list the files that it enters, in order, each with its purpose."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import workbench
from tools.structure import entered
from workbench.trace.events import Event

STAGES = {
    "submit": "From a call to the queue", "submitted": "The first step", "prefilled": "The first token",
    "decoded": "Later steps",
}  # fmt: skip


def request_walk(root: Path) -> str:
    """Return a table for each stage of a request of the demo model (backend eager): the files that the request enters
    there for the first time."""
    runner = workbench.load("demo", backend="eager")
    events: Iterator[Event] = runner.stream("def fib(n):", max_tokens=3, temperature=0)
    text, known = "", set()
    for stage, heading in STAGES.items():
        last = next(reversed(STAGES)) == stage
        names = entered(lambda last=last: list(events) if last else next(events))
        rows = "".join(_row(root, name, names[name]) for name in names if name not in known)
        known |= names.keys()
        text += f"\n### {heading}\n\n| file | entered at | what it is for |\n|---|---|---|\n{rows}" * bool(rows)
    return text


def _row(root: Path, name: str, function: str) -> str:
    purpose = " ".join((ast.get_docstring(ast.parse((root / name).read_text(encoding="utf-8"))) or "").split())
    return f"| `{name}` | `{function}` | {purpose.partition('. ')[0].rstrip('.')} |\n"
