"""`workbench report`: write a run or a sweep as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from workbench.cli.shared import AsJson, print_json


def report(
    folder: Annotated[Path, typer.Argument(help="a run folder, or a sweep's")],
    out: Annotated[Path | None, typer.Option(help="the file; beside the folder as NAME.html unless given")] = None,
    as_json: AsJson = False,
) -> None:
    """Write one HTML file with question, settings, verdict, figures, charts and machine."""
    from workbench.records.report_html import write_report

    path = write_report(folder, out)
    if as_json:
        print_json({"report": str(path), "bytes": path.stat().st_size})
    else:
        print(f"report  {path}  ({path.stat().st_size / 1024:,.0f} KiB, needs no network)")
