"""A real Ray on this machine: deaths, interruptions, and what is asked of a cluster that it has not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.processes import python
from tests.helpers.ray_cluster import own_ray
from tests.sweep.quick import began, ended, quick_sweep, quick_workers, states
from workbench.errors import WorkbenchError
from workbench.sweep.run import make_executor, run_sweep
from workbench.sweep.settings import parse_executor

__all__ = ["quick_workers"]
KILLED = """
import signal, sys
from pathlib import Path
from tests.sweep.quick import kill_holder_of, quick_command
from workbench.sweep import executor as places
from workbench.sweep.folder import SweepFolder
from workbench.sweep.run import make_executor, run_sweep
from workbench.sweep.settings import parse_executor

places.worker_command = quick_command
sweep, before = SweepFolder.read(Path(sys.argv[1])), signal.getsignal(signal.SIGTERM)
killer = kill_holder_of(sweep.points[0].folder)
rows = run_sweep(sweep, make_executor(parse_executor("{kind: ray, workers: 2}")))
killer.join()
import ray
assert not ray.is_initialized() and signal.getsignal(signal.SIGTERM) is before
assert [row.state for row in rows] == ["done"] * 4, rows
"""


@own_ray
def test_a_killed_workers_point_runs_again_and_nothing_else_runs_twice(tmp_path: Path) -> None:
    """In a process that has no Ray: the place starts it, and shuts it down."""
    sweep = quick_sweep(tmp_path, 4)
    first, *others = sweep.points
    (first.folder / "stay").touch()
    said = python("-c", KILLED, sweep.path, check=True)
    assert states(first.folder) == ["complete", "killed"] and len(began(first.folder)) == 2
    ended(began(first.folder)[0])  # the worker's child goes with it
    for point in others:
        assert states(point.folder) == ["complete"] and len(began(point.folder)) == 1
    assert "sampling.seed=0: its worker died; it runs again" in said.stderr and said.stdout == ""
    assert "WorkerCrashedError" in (first.folder / "log.txt").read_text()


def test_an_interruption_ends_the_workers_and_keeps_what_is_done(
    tmp_path: Path, quick_workers: None, ray_cluster: Any
) -> None:
    """A place uses the cluster that the caller started, and leaves it."""
    sweep = quick_sweep(tmp_path, 4)
    first, *others = [point.folder for point in sweep.points]
    (first / "stay").touch()
    place, finished = make_executor(parse_executor("ray")), []

    def interrupted(folder: Path) -> None:
        finished.append(folder)
        if len(finished) == len(others):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        place.run([first, *others], interrupted)
    assert sorted(finished) == sorted(others)
    ended(began(first)[0])
    assert states(first) == ["killed"] and [states(point) for point in others] == [["complete"]] * 3
    rows = run_sweep(sweep, place)
    assert [row.state for row in rows] == ["done"] * 4 and ray_cluster.is_initialized()
    assert states(first) == ["complete", "killed"] and [len(began(point)) for point in others] == [1] * 3


def test_a_point_that_cannot_run_is_reported_before_anything_waits_for_it(
    tmp_path: Path, quick_workers: None, ray_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "cancel", lambda *_, **options: pytest.fail("a task that has ended is cancelled"))
    sweep = quick_sweep(tmp_path, 1)
    has = int(ray_cluster.cluster_resources()["CPU"])
    place = make_executor(parse_executor(f"{{kind: ray, cpus: {has + 1}, gpus: 0.5}}"))
    words = rf"{has + 1} cpus and 0.5 gpus, .*\(at most {has} and 0\); lower executor.cpus"
    with pytest.raises(WorkbenchError, match=words):
        run_sweep(sweep, place)
    assert began(sweep.points[0].folder) == []
    with pytest.raises(WorkbenchError, match="at the same path on every node"):
        make_executor(parse_executor("ray")).run([tmp_path / "nowhere" / "points" / "key"], lambda folder: None)
    with pytest.raises(WorkbenchError, match="this process has a Ray cluster"):
        make_executor(parse_executor("{kind: ray, address: '127.0.0.1:1'}")).run([tmp_path], lambda folder: None)
