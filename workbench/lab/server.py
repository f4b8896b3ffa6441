"""Run a private JupyterLab server: its settings, kernels and runtime files are in a temporary folder, which is removed
with it."""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from urllib.error import URLError
from urllib.request import urlopen

import workbench
from workbench.errors import WorkbenchError
from workbench.lab import stay_home

CONFIG, SHARE = (Path(__file__).parent / name for name in ("config", "share"))
SOURCE = Path(workbench.__file__).resolve().parents[1]
LIMIT_S = 600.0  # limit for a server start, a page load or a notebook run: for hanging ones, not slow ones
JUPYTER_FOLDERS = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTERLAB_SETTINGS_DIR",
          "JUPYTERLAB_WORKSPACES_DIR", "IPYTHONDIR")  # fmt: skip
# Cells outside the viewport are rendered too; nothing is saved automatically.
SETTINGS = {
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
    "@jupyterlab/docmanager-extension/plugin": {"autosave": False},
    "@jupyterlab/apputils-extension/notification": {
        "fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True,
    },
}  # fmt: skip


def jupyter_environment(environment: dict[str, str], data: Path) -> dict[str, str]:
    """Return `environment` with the workbench's JupyterLab defaults and extension, and with this interpreter's kernel
    and this source tree before all others.

    The kernel is written into `data`. It replaces ipykernel's own kernel, which is named `python` and which jupytext
    does not match with this interpreter, so that a percent file without a kernel name would open with a question.
    """
    from ipykernel.kernelspec import write_kernel_spec

    write_kernel_spec(data / "kernels" / "python3")

    def before(name: str, *paths: Path) -> str:
        return os.pathsep.join([*map(str, paths), *filter(None, [environment.get(name)])])

    return environment | {
        "JUPYTER_CONFIG_PATH": before("JUPYTER_CONFIG_PATH", CONFIG),
        "JUPYTER_PATH": before("JUPYTER_PATH", data, SHARE),
        "PYTHONPATH": before("PYTHONPATH", SOURCE),
    }


class LabServer:
    """A JupyterLab server for a `with` block: `with LabServer({"notebooks": folder}) as server:` serves each folder
    under its name, in a new root folder.

    The folders are linked, not copied: a notebook finds the files next to it, and files are saved only on request. The
        server has ten minutes to start, times `timeout_factor`.
    """

    def __init__(self, folders: dict[str, Path] | None = None, timeout_factor: float = 1.0) -> None:
        self.patience = timeout_factor
        self.private = Path(tempfile.mkdtemp(prefix="workbench-lab-"))
        self.root = self.private / "root"
        self.root.mkdir()
        for name, folder in (folders or {}).items():
            (self.root / name).symlink_to(folder.resolve(), target_is_directory=True)
        self.log = self.private / "server.log"
        self.outside_log = self.private / "outside.log"
        self.token = secrets.token_hex(16)
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> LabServer:
        places = {name: self.private / name.lower() for name in JUPYTER_FOLDERS}
        for name, settings in SETTINGS.items():
            file = places["JUPYTERLAB_SETTINGS_DIR"] / f"{name}.jupyterlab-settings"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(settings))
        startup = places["IPYTHONDIR"] / "profile_default" / "startup"
        startup.mkdir(parents=True)
        shutil.copy(stay_home.__file__, startup / "00_stay_home.py")
        environment = jupyter_environment(dict(os.environ), self.private / "data")
        environment |= {name: str(path) for name, path in places.items()}
        environment[stay_home.LOG] = str(self.outside_log)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self._command(), stdout=log, stderr=log, env=environment, cwd=self.root, preexec_fn=_end_with_parent
            )
        try:
            self._wait()
        except BaseException:
            self.close()
            raise
        return self

    def _command(self) -> list[str]:
        return [
            sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1",
            f"--port={self.port}", "--ServerApp.port_retries=0", f"--ServerApp.root_dir={self.root}",
            f"--IdentityProvider.token={self.token}", "--LabApp.expose_app_in_browser=True",
            "--LabApp.extension_manager=readonly",
            # Read a notebook's pictures like notebooks: the default handler refuses files in a linked folder.
            "--ContentsManager.files_handler_class=jupyter_server.files.handlers.FilesHandler",
            f"--FileCheckpoints.checkpoint_dir={self.private / 'checkpoints'}",  # not in the linked folders
        ]  # fmt: skip

    def _wait(self) -> None:
        assert self.process is not None
        until = time.monotonic() + LIMIT_S * self.patience
        while time.monotonic() < until:
            if self.process.poll() is not None:
                break
            try:
                with urlopen(f"{self.origin}/api/status?token={self.token}", timeout=5):
                    return
            except (URLError, OSError):
                time.sleep(0.1)
        last = self.log.read_text(errors="replace").strip().splitlines()[-1:]
        raise WorkbenchError(f"lab: the server did not start on port {self.port}: {' '.join(last)}")

    def outside_requests(self) -> list[str]:
        """Return the hosts to which kernels were refused a connection, in order."""
        return self.outside_log.read_text().splitlines() if self.outside_log.exists() else []

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        shutil.rmtree(self.private, ignore_errors=True)


def _end_with_parent() -> None:
    """End the server with its parent, also if the parent is killed (Linux: prctl's PR_SET_PDEATHSIG)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]
