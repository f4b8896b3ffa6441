"""Requirements of JupyterLab and of the check, and the command that installs what is missing."""

from __future__ import annotations

import shutil
from importlib.util import find_spec

from workbench.errors import WorkbenchError

LAB_PACKAGES = ("jupyterlab", "ipywidgets", "anywidget", "jupytext", "nbclient", "nbconvert")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def missing_lab() -> str | None:
    """Return one line that names the install command, or None where JupyterLab can be opened."""
    missing = [name for name in LAB_PACKAGES if find_spec(name) is None]
    if not missing:
        return None
    return f"lab: {', '.join(missing)} not installed; pip install 'inference-workbench[lab]'"


def missing_browser() -> str | None:
    """Return one line that names the install command, or None where a browser can be driven."""
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
