"""Run a worker that ends when its parent process ends: `python -m workbench.sweep.bound PARENT MODULE WORD...`.

Linux ends the worker with its parent, however the parent ends. Elsewhere the worker finishes its point, and the next
worker of that point waits for it. Only the standard library is imported, to keep the cluster's own process small.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1  # PR_SET_PDEATHSIG, prctl(2)


def worker_arguments(point: Path) -> tuple[list[str], str, str, str]:
    """Return the arguments of `run_child` for the point in this folder, valid on any machine."""
    from workbench.machine.environment import SOURCE
    from workbench.sweep.executor import worker_command
    from workbench.sweep.point import LOG

    point = point.resolve()
    return worker_command(point)[2:], str(point / LOG), str(Path.cwd()), str(SOURCE)


def run_child(module_words: Sequence[str], log: str, folder: str, python_path: str) -> int:
    """Run `python -m` with `module_words` as a child that ends with this process, and return its exit code.

    Args:
        module_words: the module and its arguments.
        log: file to which the child's output is appended.
        folder: the child's working folder, used if it exists.
        python_path: placed before the entries of PYTHONPATH.
    """
    paths = os.pathsep.join(filter(None, (python_path, os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "workbench.sweep.bound", str(os.getpid()), *module_words]
    with Path(log).open("ab") as file:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, check=False,
            env={**os.environ, "PYTHONPATH": paths}, cwd=folder if Path(folder).is_dir() else None,
        ).returncode  # fmt: skip


def run_child_job(job: str, outcome: str, *arguments: Any) -> int:
    """Call `run_child` with `arguments`, and return its exit code; if the point then has its file `outcome`, remove its
    file `job`."""
    code = run_child(*arguments)
    point = Path(arguments[1]).parent
    if (point / outcome).exists():
        (point / job).unlink(missing_ok=True)
    return code


def bind(parent: int) -> None:
    """Make this process end when its parent process `parent` ends or has ended already."""
    with suppress(OSError, AttributeError):  # a system without prctl
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(f"process {parent}, which this one belongs to, has ended")


if __name__ == "__main__":
    bind(int(sys.argv[1]))
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
