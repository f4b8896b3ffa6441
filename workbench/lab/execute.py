"""Execute a notebook with nbclient, without a browser, and return its errors and widget outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VIEW = "application/vnd.jupyter.widget-view+json"
KERNEL_TIMEOUT_S = (
    3600  # nbclient needs a number: a slow machine takes long to start a kernel, and to send cells' outputs
)


@dataclass(frozen=True)
class CellError:
    """An error of a code cell: the cell's number (from 1; 0 is a widget's callback), its first line, and the error."""

    cell: int
    name: str
    message: str
    line: str = ""

    def __str__(self) -> str:
        where = f"cell {self.cell} ({self.line})" if self.cell else "in a widget's callback"
        return f"{where}: {self.name}: {self.message}"


def code_cells(document: Mapping[str, Any]) -> list[tuple[int, Any]]:
    """Return the code cells, each with its index among all cells."""
    return [(place, cell) for place, cell in enumerate(document["cells"]) if cell["cell_type"] == "code"]


def cell_errors(document: Mapping[str, Any]) -> Iterator[CellError]:
    """Yield the errors that ended cells, and the errors that threads of cells printed."""
    for number, (_, cell) in enumerate(code_cells(document), 1):
        line = next(iter("".join(cell["source"]).strip().splitlines()), "")
        for output in cell["outputs"]:
            if output["output_type"] == "error":
                yield CellError(number, output["ename"], output["evalue"], line)
            text = "".join(output.get("text", ""))
            if output.get("name") == "stderr" and "Traceback (most recent call last)" in text:
                yield CellError(number, "stderr", text.strip().splitlines()[-1], line)


def widget_outputs(document: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return the outputs that show a widget, as (cell id, output index)."""
    return [
        (cell["id"], place)
        for _, cell in code_cells(document)
        for place, output in enumerate(cell["outputs"])
        if VIEW in output.get("data", {})
    ]


def execute(path: Path, keep: Path | None = None) -> list[CellError]:
    """Run a percent file or .ipynb with this interpreter, in its own folder, up to the first cell that fails.

    The executed notebook is written to `keep`, with the widgets' pictures and without their state, which an export
    would prefer.
    """
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    if path.suffix == ".ipynb":
        document = nbformat.read(path, as_version=4)
    else:
        import jupytext  # of the extra `lab`

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
    with suppress(CellExecutionError):  # the cell's outputs contain the error
        client.execute()
    if keep is not None:
        nbformat.write(document, keep)
    return list(cell_errors(document))
