"""`workbench report`, `export` and `reproduce`: write a run or a sweep as one HTML file, export a record to another
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
    out: Annotated[Path | None, typer.Option(help="the file; beside the folder as NAME.html unless given")] = None,
    as_json: AsJson = False,
) -> None:
    """Write one HTML file with question, settings, verdict, figures, charts and machine."""
    from workbench.reports.report import write_report

    path = write_report(folder, out)
    if as_json:
        print_json({"report": str(path), "bytes": path.stat().st_size})
    else:
        print(f"report  {path}  ({path.stat().st_size / 1024:,.0f} KiB, needs no network)")


class Store(StrEnum):
    MLFLOW = "mlflow"


def export(
    folder: Annotated[Path, typer.Argument(help="a run folder, or a sweep's")],
    to: Annotated[Store, typer.Option("--to", help="which tool's")] = Store.MLFLOW,
    uri: Annotated[str, typer.Option(help="file:FOLDER, or a server's address")] = "file:mlruns",
    name: Annotated[str, typer.Option(help="the experiment there")] = "inference-workbench",
    as_json: AsJson = False,
) -> None:
    """Export a run, or each run of a sweep, to MLflow: settings, figures, files, environment."""
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
    out: Annotated[Path | None, typer.Option(help="where the new run goes; beside the old one unless given")] = None,
    replay: Annotated[
        bool, typer.Option("--replay", help="form every step as it was recorded, whatever the clock says")
    ] = False,
    logits: Annotated[int, typer.Option(min=0, help="requests whose logits are held against exact ones")] = 2,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="change a setting: whether that run is equal within rounding"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a record's experiment again and show the differences. Status 0: equal tokens, or with --set equal within
    rounding; 1: others; 2: it cannot run."""
    from workbench.reports.reproduce import reproduce as run_again
    from workbench.runs.record import Record

    found = run_again(Record.open(folder), out, not as_json, replay, logits, tuple(set_ or ()))
    if as_json:
        print_json(found.as_dict())
    else:
        print(found)
        print(f"new run folder  {found.repeated.path}")
    raise typer.Exit(0 if found.identical or (found.changes and found.equal_within_bound) else 1)
