"""Define `workbench report`, `export` and `reproduce`: write a run or a sweep as one HTML file, export a run to another
tool's store, and run a record's experiment again."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from workbench.cli.shared import AsJson, print_json


def report(
    folder: Annotated[Path, typer.Argument(help="a run folder, or a sweep's")],
    out: Annotated[Path | None, typer.Option(help="file to write; NAME.html beside the folder unless given")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a run or a sweep as one HTML file.

    The file has the question, settings, verdict, figures, charts and machine."""
    from workbench.reports.report import write_report

    path = write_report(folder, out)
    if as_json:
        print_json({"report": str(path), "bytes": path.stat().st_size})
    else:
        print(f"report  {path}  ({path.stat().st_size / 1024:,.0f} KiB, needs no network)")


class Store(StrEnum):
    MLFLOW = "mlflow"


def export(
    folder: Annotated[Path, typer.Argument(help="a run folder or a sweep folder")],
    to: Annotated[Store, typer.Option("--to", help="tool to export to")] = Store.MLFLOW,
    uri: Annotated[str, typer.Option(help="file:FOLDER, or an MLflow server's address")] = "file:mlruns",
    name: Annotated[str, typer.Option(help="name of the experiment in that tool")] = "inference-workbench",
    as_json: AsJson = False,
) -> None:
    """Export a run, or each run of a sweep, to MLflow.

    Settings, numbers, files and environment are exported."""
    from workbench.reports.mlflow_export import export_to_mlflow as export_to_mlflow

    found = export_to_mlflow(folder, uri, name)
    if as_json:
        print_json([asdict(each) for each in found])
        return
    for each in found:
        counts = f"{each.parameters} parameters, {each.metrics} metrics, {each.artifacts} files"
        print(f"{each.run}  ->  {to} run {each.run_id}  ({counts})")


def reproduce(
    folder: Annotated[Path, typer.Argument(help="a run folder")],
    out: Annotated[Path | None, typer.Option(help="folder for the new run; the old run's parent unless given")] = None,
    replay: Annotated[
        bool, typer.Option("--replay", help="repeat each step as recorded, whatever the clock says")
    ] = False,
    logits: Annotated[
        int, typer.Option(min=0, help="number of requests whose logits are compared with exact ones")
    ] = 2,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="change one setting, and check equality within rounding"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a record's experiment again; show the differences.

    Exit status 0: equal tokens, or with --set equal within rounding; 1: other tokens; 2: it cannot run."""
    from workbench.reports.reproduce import reproduce as run_again
    from workbench.runs.record import Record

    found = run_again(Record.open(folder), out, not as_json, replay, logits, tuple(set_ or ()))
    if as_json:
        print_json(found.as_dict())
    else:
        print(found)
        print(f"new run folder  {found.repeated.path}")
    raise typer.Exit(0 if found.identical or (found.changes and found.equal_within_bound) else 1)
