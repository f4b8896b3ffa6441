"""A worker's child ends with the worker, however that ends; what it says and its exit code come through."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.helpers.processes import python, start_python
from tests.patience import until
from tests.sweep.quick import began, ended
from workbench.sweep import bound

ROOT = Path(__file__).parents[2]


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_child_ends_with_who_started_it(tmp_path: Path) -> None:
    (tmp_path / "stay").touch()
    words = ["tests.sweep.quick_worker", str(tmp_path / "point.json")]
    code = f"from workbench.sweep.bound import run_child; run_child({words!r}, {str(tmp_path / 'log.txt')!r}, '/', '')"
    with start_python("-c", code, env={**os.environ, "PYTHONPATH": str(ROOT)}) as holder:
        until((tmp_path / "stayed").exists, lambda: holder.poll() is None)
        holder.kill()
    ended(began(tmp_path)[0])


def test_what_a_child_says_and_how_it_ends_come_through(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("before\n")
    words = ["tests.sweep.quick_worker", str(tmp_path / "nowhere" / "point.json")]
    assert bound.run_child(words, str(log), str(tmp_path), str(ROOT)) == 1
    assert log.read_text().startswith("before\n") and "No such file" in log.read_text()
    assert bound.run_child(["json.tool", "--help"], str(log), str(tmp_path / "absent"), str(ROOT)) == 0


def test_a_child_whose_parent_has_ended_does_not_begin() -> None:
    done = python("-m", "workbench.sweep.bound", "1234567", "json.tool")
    assert done.returncode == 1 and "process 1234567, which this one belongs to, has ended" in done.stderr
