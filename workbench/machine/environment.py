"""Describe the hardware and software of a run for its record: no paths, no user names, no host names."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import subprocess
import sysconfig
import time
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from workbench.machine.processor import cpu, cpu_times, others_cpu_share

PACKAGES = (
    "inference-workbench", "torch", "triton", "torch-mlir", "einops", "numpy",
    "tokenizers", "transformers", "safetensors", "pydantic", "pyarrow", "duckdb",
)  # fmt: skip
COMMAND_S = 60  # time limit for git commands
SOURCE = Path(__file__).resolve().parents[2]


def environment(with_torch: bool = True, repository: Path | None = SOURCE, sample_seconds: float = 0.25) -> dict:
    """Return everything that may explain a measurement, JSON-ready; null if this system does not report it.

    Args:
        with_torch: Import torch for threads and GPUs; versions need no import.
        repository: Folder whose git commit is reported; None reports none.
        sample_seconds: Duration of sampling other processes' CPU use. For a whole run call `cpu_times` before and
            `others_cpu_share` after.
    """
    before = cpu_times()
    time.sleep(sample_seconds)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "packages": {name: _version(name) for name in PACKAGES},
        "cpu": cpu(),
        "memory_bytes": psutil.virtual_memory().total,
        "threads": _threads(with_torch),
        "gpu": _gpus(with_torch),
        "load_average": list(psutil.getloadavg()),
        "others_cpu_share": others_cpu_share(before),
        "commit": commit(repository) if repository else None,
        "compiler": _compiler(),
        "python_headers": Path(sysconfig.get_path("include"), "Python.h").is_file(),
    }


def child_environment(**variables: str) -> dict[str, str]:
    """Return the environment variables for a child process that imports this workbench, even if the workbench is not
    installed."""
    paths = filter(None, (str(SOURCE), os.environ.get("PYTHONPATH")))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables}


def commit(repository: Path) -> dict | None:
    """Return the git commit and dirty flag of the repository that contains this package's source; None if there is
    none."""
    tracked = "workbench/errors.py"  # an installed copy may lie inside another checkout
    if _git(repository, "ls-files", "--error-unmatch", tracked) is None:
        return None
    head, changes = _git(repository, "rev-parse", "HEAD"), _git(repository, "status", "--porcelain")
    return None if head is None else {"hash": head, "dirty": None if changes is None else bool(changes)}


def _git(repository: Path, *arguments: str) -> str | None:
    variables = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    return _output(["git", "-C", str(repository), *arguments], variables)


def _output(command: list[str], environment_variables: dict[str, str] | None = None) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, env=environment_variables)
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _threads(with_torch: bool) -> dict:
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    out: dict = {name: os.environ.get(name) for name in names}
    torch = _torch(with_torch)
    return out | {"torch": torch.get_num_threads() if torch else None}


def _gpus(with_torch: bool) -> list[str] | None:
    torch = _torch(with_torch)
    if torch is None:
        return None
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.cuda.get_device_name(index) for index in range(count)]


def _torch(wanted: bool) -> Any:
    """Return the torch module, or None if it is not wanted, absent or broken."""
    try:
        return importlib.import_module("torch") if wanted else None
    except (ImportError, OSError):
        return None


def _compiler() -> str | None:
    """Return the C++ compiler's own version line without its path; None if there is no compiler."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (found := shutil.which(name.split()[0])):
            lines = (_output([found, "--version"]) or "").splitlines()
            words = lines[0].split() if lines else [Path(found).name]
            return " ".join(Path(word).name if word.startswith(("/", "\\")) else word for word in words)
    return None
