"""`workbench reproduce`: run a record's experiment again, and show the differences."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from workbench.cli.shared import AsJson, print_json


def reproduce(
    folder: Annotated[Path, typer.Argument(help="a run folder")],
    out: Annotated[Path | None, typer.Option(help="where the new run goes; beside the old one unless given")] = None,
    replay: Annotated[
        bool, typer.Option("--replay", help="form every step as it was recorded, whatever the clock says")
    ] = False,
    logits: Annotated[int, typer.Option(min=0, help="requests whose logits are held against exact ones")] = 2,
    as_json: AsJson = False,
) -> None:
    """Run a record's experiment again and show the differences. Status 0: equal tokens; 1: others; 2: it cannot run."""
    from workbench.records.reproduce import reproduce as run_again
    from workbench.study.record import Record

    found = run_again(Record.open(folder), out, not as_json, replay, logits)
    if as_json:
        print_json(found.as_dict())
    else:
        print(found)
        print(f"new run folder  {found.repeated.path}")
    raise typer.Exit(0 if found.identical else 1)
