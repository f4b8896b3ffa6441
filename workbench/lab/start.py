"""Start JupyterLab with the notebooks and the user's settings, or report the missing package and the command that
installs it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from workbench.errors import WorkbenchError
from workbench.lab.course import START_PAGE

LAB_PACKAGES = ("jupyterlab", "ipywidgets", "anywidget", "jupytext", "nbclient", "nbconvert")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def missing_lab() -> str | None:
    """Return one line with the install command if JupyterLab is missing, else None."""
    missing = [name for name in LAB_PACKAGES if find_spec(name) is None]
    if not missing:
        return None
    return f"lab: {', '.join(missing)} not installed; pip install 'inference-workbench[lab]'"


def missing_browser() -> str | None:
    """Return one line with the install command if no browser can be driven, else None."""
    if find_spec("playwright") is None:
        return "lab: playwright is not installed; pip install playwright (no `playwright install`)"
    if chromium() is None:
        return "lab: no Chromium on this machine; apt-get install chromium"
    return None


def chromium() -> str | None:
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


def require(*answers: str | None) -> None:
    for answer in answers:
        if answer:
            raise WorkbenchError(answer)


def notebooks_folder(given: Path | None = None) -> Path:
    """Return `given`, or the nearest folder `notebooks` from the current folder upwards."""
    if given is not None:
        if not given.is_dir():
            raise WorkbenchError(f"--folder {given}: no such folder; name one that holds notebooks")
        return given.resolve()
    here = Path.cwd()
    for place in (here, *here.parents):
        if place.name == "notebooks" or (place / "notebooks").is_dir():
            return place if place.name == "notebooks" else place / "notebooks"
    hint = "name one with --folder, or copy the course: workbench init DIR --course"
    raise WorkbenchError(f"no folder notebooks/ in {here} or above; {hint}")


def notebooks_in(folder: Path) -> list[Path]:
    """Return the percent files by name, and .ipynb files that have no percent file of the same name."""
    percent = [path for path in folder.glob("*.py") if is_percent(path)]
    paired = {path.stem for path in percent}
    alone = [path for path in folder.glob("*.ipynb") if path.stem not in paired]
    return sorted((*percent, *alone))


def is_percent(path: Path) -> bool:
    return any(line.startswith("# %%") for line in path.read_text(encoding="utf-8").splitlines())


def start(folder: Path, notebook: str | None = None, port: int | None = None, browser: bool = True) -> int:
    """Open JupyterLab in `folder`, wait until it ends, and return its exit code.

    It opens `notebook`, or else the start page if the folder has one.
    """
    require(missing_lab())
    from workbench.lab.server import jupyter_environment

    with tempfile.TemporaryDirectory(prefix="workbench-lab-") as data:
        environment = jupyter_environment(dict(os.environ), Path(data))
        process = subprocess.Popen(command(folder, notebook or start_page(folder), port, browser), env=environment)
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:  # JupyterLab received it too, and asks before it ends
                continue


def start_page(folder: Path) -> str | None:
    """Return the name of the course's start page; None if the folder has none."""
    return START_PAGE if (folder / START_PAGE).is_file() else None


def command(folder: Path, notebook: str | None, port: int | None, browser: bool) -> list[str]:
    words = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={folder}"]
    if notebook is not None:
        words.append(f"--LabApp.default_url=/lab/tree/{notebook}")
    if port is not None:
        words.append(f"--port={port}")
    if not browser:
        words.append("--no-browser")
    if hasattr(os, "geteuid") and os.geteuid() == 0:  # the only user of a container is often root
        words.append("--allow-root")
    return words
