"""`workbench init`: create a folder with an example project to adapt."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from workbench.errors import WorkbenchError, cannot_write
from workbench.lab.course import FIRST_PICTURE
from workbench.own_folder import OWN_EXPERIMENTS, OWN_NOTEBOOKS

TEMPLATE = OWN_EXPERIMENTS / "project"
NEXT = {
    "workbench run first.yaml": "run the experiment and keep a record in runs/",
    "pytest": "test the mask and the filter against their laws",
    "jupyter lab notebook.ipynb": "opens the notebook",
}


def init(
    folder: Annotated[Path, typer.Argument(help="a new folder, or an empty one")],
    course: Annotated[
        bool, typer.Option("--course", help="also copy the notebooks of the course, to notebooks/")
    ] = False,
) -> None:
    """Copy an example project to a new folder.

    It has one experiment, one mask, one filter, one notebook, and a test of their laws."""
    files = write_project(folder, course)
    print(f"{folder}: {', '.join(files)}\n\nnext:\n")
    print(f"    cd {folder}")
    for command, what in NEXT.items():
        print(f"    {command:26} # {what}")


def write_project(folder: Path, course: bool = False) -> list[str]:
    """Copy the template to `folder`, and the course to its folder `notebooks`; return the names of the files.

    Raises:
        WorkbenchError: `folder` is a file or not empty, or it cannot be written. Existing files do not change.
    """
    sources = {path.name: path for path in sorted(TEMPLATE.iterdir()) if path.is_file()}
    if course:
        found = [path for path in sorted(OWN_NOTEBOOKS.glob("*")) if path.suffix in (".py", ".toml")]
        found += [OWN_NOTEBOOKS / FIRST_PICTURE]
        sources |= {f"notebooks/{path.relative_to(OWN_NOTEBOOKS)}": path for path in found}
    if folder.is_dir() and (there := sorted(path.name for path in folder.iterdir())):
        names = ", ".join(there[:3]) + (", ..." if len(there) > 3 else "")
        raise WorkbenchError(f"init: the folder {folder} is not empty ({names}); give a new one, nothing was written")
    if folder.exists() and not folder.is_dir():
        raise WorkbenchError(f"init: {folder} is a file; give a new folder, nothing was written")
    try:
        for name, source in sources.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(source.read_bytes())
    except OSError as error:
        raise cannot_write(str(folder), error) from error
    return [*sources]
