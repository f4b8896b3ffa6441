"""Execute a notebook with nbclient, without a browser, and read its errors and widget outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VIEW = "application/vnd.jupyter.widget-view+json"
KERNEL_TIMEOUT_S = (
    3600  # nbclient wants a number: a slow machine takes long to start a kernel, and to hand on what cells show
)


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


def execute(path: Path, keep: Path | None = None) -> list[CellError]:
    """Run a percent file or .ipynb with this interpreter, in its own folder, up to the first cell that fails.

    The executed notebook is written to `keep`. The widgets' state is not stored in it: their pictures are, and an
    export would prefer the state.
    """
    import jupytext
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    document = jupytext.read(path)
    client = NotebookClient(
        document,
        kernel_name="python3",
        timeout=None,
        startup_timeout=KERNEL_TIMEOUT_S,
        iopub_timeout=KERNEL_TIMEOUT_S,
        resources={"metadata": {"path": str(path.parent)}},
        store_widget_state=False,
    )
    with suppress(CellExecutionError):  # the cell's outputs have it
        client.execute()
    if keep is not None:
        nbformat.write(document, keep)
    return list(cell_errors(document))
