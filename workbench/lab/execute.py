"""Execute a notebook with nbclient, without a browser."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from workbench.lab.cells import CellError, cell_errors

KERNEL_TIMEOUT_S = 3600  # nbclient wants a number: a slow machine takes long to start a kernel, and to hand on what cells show


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
