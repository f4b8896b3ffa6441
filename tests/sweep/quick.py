"""Sweeps of points that take no time: places know folders and processes, and these are enough of both."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from tests.patience import until
from workbench.experiment.experiment import Experiment
from workbench.runs import process as alive
from workbench.runs.record import Record
from workbench.sweep import executor as places
from workbench.sweep.folder import SweepFolder
from workbench.sweep.point import POINT

ASKED = {
    "question": "where does it run?",
    "backend": "eager",
    "workload": {"kind": "prompts", "prompts": ["x ="]},
}


def quick_sweep(parent: Path, count: int) -> SweepFolder:
    """With `count` points, written."""
    asked = ASKED | {"sweep": {"axes": {"sampling.seed": list(range(count))}}}
    sweep = SweepFolder.create(Experiment.from_values(asked), parent, "quick")
    sweep.write()
    return sweep


def quick_command(point: Path) -> list[str]:
    return [sys.executable, "-m", "tests.sweep.quick_worker", str(point / POINT)]


@pytest.fixture
def quick_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "worker_command", quick_command)


def began(folder: Path) -> list[dict]:
    """The processes that began a point, in their order."""
    try:
        return [json.loads(line) for line in (folder / "began.txt").read_text().splitlines()]
    except OSError:
        return []


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def states(folder: Path) -> list[str]:
    """Of a point's run folders, oldest first."""
    paths = sorted(folder.glob("run-*"), key=lambda path: path.stat().st_mtime_ns)
    return sorted(Record.open(path, incomplete_ok=True).state for path in paths)


def kill_holder_of(folder: Path) -> threading.Thread:
    """As soon as a worker has begun the point, SIGKILL for the process that started it."""

    def wait_and_kill() -> None:
        until((folder / "stayed").exists)
        os.kill(parent_of(began(folder)[0]["pid"]), signal.SIGKILL)

    killer = threading.Thread(target=wait_and_kill, daemon=True)
    killer.start()
    return killer


def ended(mark: dict) -> None:
    """Wait until a process has ended."""
    until(lambda: not alive.is_running(mark))
