"""Start JupyterLab on the notebooks, with the user's own settings and defaults that suit percent files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from workbench.lab.needs import missing_lab, require


def start(folder: Path, notebook: str | None = None, port: int | None = None, browser: bool = True) -> int:
    """Open JupyterLab on `folder`, wait until it ends, and return its exit code."""
    require(missing_lab())
    from workbench.lab.server import jupyter_environment

    with tempfile.TemporaryDirectory(prefix="workbench-lab-") as data:
        environment = jupyter_environment(dict(os.environ), Path(data))
        process = subprocess.Popen(command(folder, notebook, port, browser), env=environment)
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:  # JupyterLab heard it too, and asks before it ends
                continue


def command(folder: Path, notebook: str | None, port: int | None, browser: bool) -> list[str]:
    words = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={folder}"]
    if notebook is not None:
        words.append(f"--LabApp.default_url=/lab/tree/{notebook}")
    if port is not None:
        words.append(f"--port={port}")
    if not browser:
        words.append("--no-browser")
    if hasattr(os, "geteuid") and os.geteuid() == 0:  # a container's only user is often root
        words.append("--allow-root")
    return words
