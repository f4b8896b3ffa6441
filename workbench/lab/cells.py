"""Read errors and widget outputs from an executed notebook."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

VIEW = "application/vnd.jupyter.widget-view+json"


@dataclass(frozen=True)
class CellError:
    """An error of a code cell (counted from 1; 0 is a widget's callback), and the cell's first line."""

    cell: int
    name: str
    message: str
    line: str = ""

    def __str__(self) -> str:
        where = f"cell {self.cell} ({self.line})" if self.cell else "in a widget's callback"
        return f"{where}: {self.name}: {self.message}"


def code_cells(document: Mapping[str, Any]) -> list[tuple[int, Any]]:
    """List the code cells, each with its index among all cells."""
    return [(place, cell) for place, cell in enumerate(document["cells"]) if cell["cell_type"] == "code"]


def cell_errors(document: Mapping[str, Any]) -> Iterator[CellError]:
    """Yield errors that cells ended with, and those that their threads have printed."""
    for number, (_, cell) in enumerate(code_cells(document), 1):
        line = next(iter("".join(cell["source"]).strip().splitlines()), "")
        for output in cell["outputs"]:
            if output["output_type"] == "error":
                yield CellError(number, output["ename"], output["evalue"], line)
            text = "".join(output.get("text", ""))
            if output.get("name") == "stderr" and "Traceback (most recent call last)" in text:
                yield CellError(number, "stderr", text.strip().splitlines()[-1], line)


def widget_outputs(document: Mapping[str, Any]) -> list[tuple[str, int]]:
    """List the outputs that show a widget, by the cell's id and the output's index."""
    return [
        (cell["id"], place)
        for _, cell in code_cells(document)
        for place, output in enumerate(cell["outputs"])
        if VIEW in output.get("data", {})
    ]
