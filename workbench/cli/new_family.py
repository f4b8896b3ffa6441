"""`workbench new-family`: a file that registers a family of one's own, and its test, from a folder's config."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def new_family(
    name: Annotated[str, typer.Argument(help="what the family's function and files are called")],
    folder: Annotated[Path, typer.Argument(help="a model's folder; its config.json is read, and its tensors' names")],
    out: Annotated[Path, typer.Option(help="folder in which NAME.py and test_NAME.py are written")] = Path(),
) -> None:
    """Write a family of one's own: known keys are read as the nearest known family does, others refuse until they are
    decided. Nothing of the installed package is edited."""
    from workbench.check.scaffold import scaffold

    for file in scaffold(name, folder, out):
        print(file)
