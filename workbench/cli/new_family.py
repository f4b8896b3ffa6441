"""`workbench model new-family`: write a file that registers a new model family, and its test, from a model folder's
config.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def new_family(
    name: Annotated[str, typer.Argument(help="name of the family's function and files")],
    folder: Annotated[Path, typer.Argument(help="a model's folder; config.json and tensor names are read")],
    out: Annotated[Path, typer.Option(help="folder in which NAME.py and test_NAME.py are written")] = Path(),
) -> None:
    """Write a new model family.

    Known keys are read as in the most similar known family; unknown keys raise an error until you edit the file. The
    installed package does not change."""
    from workbench.check.scaffold import scaffold

    for file in scaffold(name, folder, out):
        print(file)
