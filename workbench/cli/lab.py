"""`workbench lab`: open JupyterLab on the notebooks, or check them all in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from workbench.cli.shared import AsJson, console, find_in_checkout, print_json
from workbench.display import Table
from workbench.errors import WorkbenchError

if TYPE_CHECKING:
    from tools.notebooks.check import NotebookVisit


def lab(
    notebook: Annotated[list[str] | None, typer.Argument(help="a notebook to open, or those to check")] = None,
    folder: Annotated[Path | None, typer.Option(help="the notebooks; else the nearest notebooks/ upwards")] = None,
    port: Annotated[int | None, typer.Option(help="the server's; 8888 or the next free one unless given")] = None,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="open a tab in your browser")] = True,
    check: Annotated[bool, typer.Option("--check", help="open and run everything headlessly, and report")] = False,
    pictures: Annotated[Path | None, typer.Option(help="with --check: a folder for a picture of each widget")] = None,
    dark: Annotated[bool, typer.Option("--dark", help="with --pictures: in the dark theme too")] = False,
    keep: Annotated[Path | None, typer.Option(help="with --check: keep executed notebooks and exports here")] = None,
    as_json: AsJson = False,
) -> None:
    """Open JupyterLab on the notebooks, or check that all of them work in a real browser, offline."""
    from workbench.lab.start import notebooks_folder

    if not check and (pictures or dark or keep or as_json):
        raise WorkbenchError("lab: --pictures, --dark, --keep and --json go with --check")
    if dark and pictures is None:
        raise WorkbenchError("lab: --dark goes with --pictures FOLDER")
    place = notebooks_folder(folder)
    if not check:
        from workbench.lab.start import start

        if len(notebook or ()) > 1:
            raise WorkbenchError("lab: one notebook opens at a time; name several with --check")
        raise typer.Exit(start(place, notebook[0] if notebook else None, port, browser))
    visits = _check(place, notebook or [], pictures, dark, keep, as_json)
    raise typer.Exit(1 if any(visit.faults for visit in visits) else 0)


def _check(
    folder: Path, only: list[str], pictures: Path | None, dark: bool, keep: Path | None, as_json: bool
) -> list[NotebookVisit]:
    find_in_checkout("tools/notebooks", "lab: --check")
    from rich.markup import escape  # see `console`

    from tools.notebooks.check import WidgetScreenshots, check_notebooks

    album = WidgetScreenshots(pictures, dark) if pictures else None
    if as_json:
        visits = check_notebooks(folder, only, album, keep)
        notebooks = [visit.to_dict() for visit in visits]
        print_json({"folder": str(folder), "ok": not any(n["faults"] for n in notebooks), "notebooks": notebooks})
        return visits
    out = console()
    with out.status("opening JupyterLab") as status:
        visits = check_notebooks(
            folder, only, album, keep, on_visit=lambda visit: status.update(f"{visit.notebook} done")
        )
    out.print(_table(visits))
    for visit in visits:
        for fault in visit.faults:
            out.print(f"[red]{visit.notebook}[/red]  {escape(fault)}")
    if pictures:
        out.print(f"pictures  {pictures}")
    return visits


def _table(visits: list[NotebookVisit]) -> Table:
    from rich.text import Text  # see `console`

    rows = []
    for visit in visits:
        counts = (visit.errors, visit.console_errors, visit.outside_requests, visit.without_picture)
        name = Text(str(visit.notebook), style="red" if visit.faults else "green")
        ran = f"{visit.num_run}/{visit.num_cells}"
        rows.append((name, f"{visit.seconds:.1f}", ran, *map(len, counts), list(dict.fromkeys(visit.widgets))))
    headings = ("notebook", "seconds", "cells", "errors", "console", "outside", "no picture", "widgets")
    return Table("", rows, headings, left=("widgets",))
