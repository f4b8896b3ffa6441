"""`workbench export`: export a record to another tool's store."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from workbench.cli.shared import AsJson, print_json


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
    from workbench.records.mlflow_export import export_to_mlflow as export_to_mlflow

    found = export_to_mlflow(folder, uri, name)
    if as_json:
        print_json([asdict(each) for each in found])
        return
    for each in found:
        counts = f"{each.parameters} parameters, {each.metrics} metrics, {each.artifacts} files"
        print(f"{each.run}  ->  {to} run {each.run_id}  ({counts})")
