"""Build the wheel, with the project's experiments and notebooks inside the package as data.

pyproject.toml names `BuildWithProject` as setuptools' command `build_py`. An editable install copies nothing: there
`workbench.own_folder.OWN_FOLDER` is the checkout.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools.command.build_py import build_py

# Of each folder, patterns of what is left out.
FOLDERS = {"experiments": ("LOG.md", "runs"), "notebooks": ("pictures", "runs", "*.ipynb")}
KEPT = "notebooks/pictures/start.png"  # the start page shows it


class BuildWithProject(build_py):
    """A build command that copies modules and package data, and then `experiments` and `notebooks` into
    `workbench/_checkout`."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib) / "workbench" / "_checkout"
        shutil.rmtree(target, ignore_errors=True)
        for folder, left_out in FOLDERS.items():
            ignored = shutil.ignore_patterns("__pycache__", ".*", *left_out)
            shutil.copytree(folder, target / folder, ignore=ignored)
        (target / KEPT).parent.mkdir()
        shutil.copyfile(KEPT, target / KEPT)
