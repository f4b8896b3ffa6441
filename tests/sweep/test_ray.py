"""A real Ray on this machine: deaths, interruptions, and what is asked of a cluster that it has not."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sweep.quick import began, ended, kill_holder_of, quick_sweep, quick_workers, states
from workbench.errors import WorkbenchError
from workbench.ray_start import import_ray, start_ray
from workbench.sweep.run import make_executor, run_sweep
from workbench.sweep.settings import parse_executor

pytest.importorskip("ray", reason="pip install 'ray>=2.40'")
__all__ = ["quick_workers"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """One with two cores that the caller started: a place uses it, and leaves it."""
    ray = import_ray()
    start_ray(
        ray, address="local", num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False,
        logging_level=logging.ERROR,
    )  # fmt: skip
    yield ray
    assert ray.is_initialized()
    ray.shutdown()


def test_a_killed_workers_point_runs_again_and_nothing_else_runs_twice(
    tmp_path: Path, quick_workers: None, capfd: pytest.CaptureFixture[str]
) -> None:
    import ray

    sweep = quick_sweep(tmp_path, 4)
    first, *others = sweep.points
    (first.folder / "stay").touch()
    killer = kill_holder_of(first.folder)
    before = signal.getsignal(signal.SIGTERM)
    rows = run_sweep(sweep, make_executor(parse_executor("{kind: ray, workers: 2}")))
    killer.join()
    assert [row.state for row in rows] == ["done"] * 4
    assert states(first.folder) == ["complete", "killed"] and len(began(first.folder)) == 2
    ended(began(first.folder)[0])  # the worker's child goes with it
    for point in others:
        assert states(point.folder) == ["complete"] and len(began(point.folder)) == 1
    said = capfd.readouterr()
    assert "sampling.seed=0: its worker died; it runs again" in said.err
    assert said.out == ""
    assert "WorkerCrashedError" in (first.folder / "log.txt").read_text()
    assert not ray.is_initialized() and signal.getsignal(signal.SIGTERM) is before


def test_an_interruption_ends_the_workers_and_keeps_what_is_done(
    tmp_path: Path, quick_workers: None, cluster: Any
) -> None:
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
    assert [row.state for row in rows] == ["done"] * 4
    assert states(first) == ["complete", "killed"] and [len(began(point)) for point in others] == [1] * 3


def test_a_point_that_cannot_run_is_reported_before_anything_waits_for_it(
    tmp_path: Path, quick_workers: None, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "cancel", lambda *task, **options: pytest.fail("a task that has ended is cancelled"))
    sweep = quick_sweep(tmp_path, 1)
    place = make_executor(parse_executor("{kind: ray, cpus: 3, gpus: 0.5}"))
    with pytest.raises(WorkbenchError, match=r"3 cpus and 0.5 gpus, .*\(at most 2 and 0\); lower executor.cpus"):
        run_sweep(sweep, place)
    assert began(sweep.points[0].folder) == []
    with pytest.raises(WorkbenchError, match="at the same path on every node"):
        make_executor(parse_executor("ray")).run([tmp_path / "nowhere" / "points" / "key"], lambda folder: None)
    with pytest.raises(WorkbenchError, match="this process has a Ray cluster"):
        make_executor(parse_executor("{kind: ray, address: '127.0.0.1:1'}")).run([tmp_path], lambda folder: None)
