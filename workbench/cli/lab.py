"""`workbench lab`: open JupyterLab on the notebooks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def lab(
    notebook: Annotated[str | None, typer.Argument(help="notebook to open; the start page unless given")] = None,
    folder: Annotated[
        Path | None, typer.Option(help="folder of notebooks; nearest notebooks/ here or above unless given")
    ] = None,
    port: Annotated[int | None, typer.Option(help="port of the server; 8888 or the next free one unless given")] = None,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="open a tab in your browser")] = True,
) -> None:
    """Open JupyterLab on the notebooks."""
    from workbench.lab.start import notebooks_folder, start

    raise typer.Exit(start(notebooks_folder(folder), notebook, port, browser))
