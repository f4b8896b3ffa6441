"""Sweeps that run: resumed, killed, with points that fail and workers that die; nothing is done twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command_line import answer, cli
from tests.helpers.refusals import refuses
from tests.patience import until
from tests.sweep.points import planned, write
from workbench.cli import main
from workbench.experiment.experiment import Experiment
from workbench.reports.reproduce import reproduce
from workbench.runs.folder import RunFolder
from workbench.runs.record import Record
from workbench.sweep import executor as places
from workbench.sweep import local, run, worker
from workbench.sweep.folder import SweepFolder, experiment_with_axes
from workbench.sweep.local import LocalSweepExecutor
from workbench.sweep.point import OUTCOME, POINT, PointResult, SweepPoint
from workbench.sweep.run import make_executor, read_rows, run_sweep
from workbench.sweep.settings import LocalSweepConfig, parse_executor
from workbench.sweep.worker import RUN_NAME, run_point

SIZES = "workload.output_tokens=2,3,4"


def states(sweep: SweepFolder, place: places.SweepExecutor, **more: Any) -> list[str]:
    """Run a sweep, and return the state of each point."""
    return [row.state for row in run_sweep(sweep, place, progress=False, **more)]


class Pretended:
    """A place without processes: each point is done at once, except where `dies` says that its worker does."""

    def __init__(self, dies: Callable[[Path, int], bool] = lambda point, attempt: False, stops_after: int = 10**9):
        self.dies, self.stops_after = dies, stops_after
        self.ran: list[str] = []

    def run(self, points: Sequence[Path], on_end: Callable[[Path], None]) -> None:
        for point in points:
            if len(self.ran) == self.stops_after:
                raise KeyboardInterrupt
            self.ran.append(point.name)
            if not self.dies(point, self.ran.count(point.name)):
                run = RunFolder.create(point, RUN_NAME)
                PointResult(point.name, run.finish(), None, 0.1).write(point)
            on_end(point)


def test_a_sweep_runs_each_point_once_and_resumed_none(tmp_path: Path) -> None:
    sweep, place = planned(tmp_path, SIZES), Pretended()
    assert states(sweep, place) == ["done"] * 3
    assert place.ran == [point.key for point in sweep.points]
    again = SweepFolder.read(sweep.path)
    assert again == replace(sweep, experiment=again.experiment) and again.experiment.sweep == sweep.experiment.sweep
    nothing = Pretended()
    assert states(again, nothing) == ["done"] * 3 and not nothing.ran


@pytest.mark.parametrize("stop", range(4))
def test_interrupted_anywhere_the_rest_runs_and_nothing_twice(tmp_path: Path, stop: int) -> None:
    sweep, first, second = planned(tmp_path, SIZES), Pretended(stops_after=stop), Pretended()
    if stop < 3:
        with pytest.raises(KeyboardInterrupt):
            run_sweep(sweep, first, progress=False)
    else:
        run_sweep(sweep, first, progress=False)
    assert states(SweepFolder.read(sweep.path), second) == ["done"] * 3
    assert sorted(first.ran + second.ran) == sorted(point.key for point in sweep.points)


def test_sigterm_leaves_what_is_done_and_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended(Pretended):
        def run(self, points: Sequence[Path], on_end: Callable[[Path], None]) -> None:
            super().run(points[:2], on_end)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(run, "make_executor", lambda setting: Ended())
    before = signal.getsignal(signal.SIGTERM)
    ran = cli(f"sweep --set {SIZES} --json", write(tmp_path), "--out", tmp_path / "runs", code=130)
    assert signal.getsignal(signal.SIGTERM) == before
    (folder,) = (tmp_path / "runs").iterdir()
    message = f"interrupted: 2 of 3 points have an outcome; continue: workbench sweep --resume {folder}"
    assert message in ran.err


def test_a_sweep_may_be_extended_and_only_what_is_new_runs(tmp_path: Path) -> None:
    sweep, place = planned(tmp_path, SIZES), Pretended()
    run_sweep(sweep, Pretended(), progress=False)
    more = sweep.extend(experiment_with_axes(tmp_path / "tiny.yaml", ["workload.output_tokens=4,5"]))
    assert len(run_sweep(more, place, progress=False)) == 4
    assert [SweepPoint.read(sweep.path / "points" / key).settings for key in place.ran] == [
        {"workload.output_tokens": 5}
    ]


def test_what_is_gone_or_damaged_runs_again(tmp_path: Path) -> None:
    sweep = planned(tmp_path, SIZES)
    rows = run_sweep(sweep, Pretended(), progress=False)
    outcomes = [row.outcome for row in rows]
    assert outcomes[0] is not None and outcomes[0].folder is not None
    (outcomes[0].folder / "manifest.json").unlink()  # as of a copy that ended early
    (sweep.points[1].folder / OUTCOME).write_text('{"key": "')
    assert [row.state for row in read_rows(sweep)] == ["to run", "to run", "done"]
    assert outcomes[2] is not None and outcomes[2].folder is not None
    lacking = '{"files": {"summary.json": {"bytes": 5, "sha256": "0"}}}'
    (outcomes[2].folder / "manifest.json").write_text(lacking)  # one file of many was not copied
    assert [row.state for row in read_rows(sweep)] == ["to run"] * 3


def test_a_worker_that_dies_is_followed_by_another_and_then_given_up(tmp_path: Path) -> None:
    sweep = planned(tmp_path, SIZES)
    once, always, _ = sweep.points
    place = Pretended(lambda point, attempt: point == always.folder or (point == once.folder and attempt == 1))
    rows = run_sweep(sweep, place, progress=False)
    assert [row.state for row in rows] == ["done", "failed", "done"]
    assert [place.ran.count(point.key) for point in sweep.points] == [2, 2, 1]
    outcome = rows[1].outcome
    assert outcome is not None and outcome.error is not None and "its worker died 2 times" in outcome.error
    assert states(sweep, place) == ["done", "failed", "done"]
    assert len(place.ran) == 5  # what failed is asked for by name
    assert states(sweep, Pretended(), retry_failed=True) == ["done"] * 3


def test_points_that_a_place_does_not_tell_of_are_still_to_run(tmp_path: Path) -> None:
    class Elsewhere:
        def run(self, points: Sequence[Path], on_end: Callable[[Path], None]) -> None: ...

    assert states(planned(tmp_path, SIZES), Elsewhere()) == ["to run"] * 3


def test_a_point_is_a_run_like_any_other(tmp_path: Path) -> None:
    sweep = planned(tmp_path, "workload.output_tokens=3", "workload.seed=0,1")
    sweep.write()
    point = sweep.points[1]
    outcome = run_point(point.folder)
    assert outcome.error is None and outcome.folder is not None and outcome.folder.parent == point.folder
    record = Record.open(outcome.folder)
    assert Experiment.from_yaml(record.experiment_text) == point.experiment
    assert record.summary["tokens"]["output"] == 6
    assert run_point(point.folder) == outcome == PointResult.read(point.folder)  # nothing twice
    cli("reproduce", outcome.folder, "--out", tmp_path)


def test_second_worker_of_a_point_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep, waits = planned(tmp_path, "workload.output_tokens=3"), list[bool]()
    sweep.write()
    (point,) = sweep.points
    asks = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_SH | fcntl.LOCK_NB)"

    def ask() -> None:  # even a shared lock is refused beside an exclusive one
        asked = subprocess.run([sys.executable, "-c", asks, point.folder / worker.LOCK], capture_output=True)
        waits.append(b"BlockingIOError" in asked.stderr)

    monkeypatch.setattr(worker, "_run_experiment", lambda point: ask() or (None, "no run"))
    assert run_point(point.folder).error == "no run"
    ask()
    assert waits == [True, False]


@pytest.mark.parametrize("within", [".", "points", "points/{point}", "points/{point}/{run}/new"])
def test_a_point_reproduced_leaves_its_sweep_as_it_was(within: str, tmp_path: Path) -> None:
    """Its repetition is a run beside the sweep, and no command can name a folder within."""
    sweep = planned(tmp_path, "workload.output_tokens=3")
    sweep.write()
    (point,) = sweep.points
    run = run_point(point.folder).folder
    assert run is not None
    before = {each: each.read_bytes() for each in sweep.path.rglob("*") if each.is_file()}
    again = reproduce(run, progress=False, logit_checks=0).repeated.path
    assert again.parent == sweep.path.parent.resolve() and again.name.startswith("reproduce-")
    refuses(
        "must not change; choose a folder outside it",
        lambda: reproduce(run, sweep.path / within.format(point=point.key, run=run.name), progress=False),
    )
    twice = reproduce(again, progress=False, logit_checks=0).repeated.path
    assert twice.parent == again.parent, "a repetition has its own beside it too"
    refuses("must not change", lambda: reproduce(again, again / "new", progress=False))
    assert {each: each.read_bytes() for each in sweep.path.rglob("*") if each.is_file()} == before


def test_an_error_is_the_outcome(tmp_path: Path) -> None:
    sweep = planned(tmp_path, "model.seed=0,1", "cache.pages=1", "workload.prompt_tokens=100")
    sweep.write()
    refused = run_point(sweep.points[0].folder)  # 100 tokens never fit into one page
    assert refused.folder is not None and refused.error == "of 2 requests: 2 refused"
    wrong = planned(tmp_path, "model.name=nowhere,elsewhere")
    wrong.write()
    outcome = run_point(wrong.points[0].folder)
    assert outcome.folder is None and "no model 'nowhere'" in str(outcome.error)


def test_a_point_that_was_changed_is_refused(tmp_path: Path) -> None:
    sweep = planned(tmp_path, SIZES)
    sweep.write()
    file = sweep.points[0].folder / POINT
    values = json.loads(file.read_text())
    values["experiment"]["workload"]["output_tokens"] = 9
    file.write_text(json.dumps(values))
    refuses("was changed since it was planned", SweepFolder.read, sweep.path)


def endless_after_one(out: Path) -> Callable[[Path], list[str]]:
    """Commands for workers: once a point has an outcome, of one that begins the next, never ends, and dies with us."""

    def command(point: Path) -> list[str]:
        if not list(out.glob(f"*/points/*/{OUTCOME}")):
            return places.worker_command(point)
        (point / "stay").touch()
        bound = [sys.executable, "-m", "workbench.sweep.bound", str(os.getpid())]
        return [*bound, "tests.sweep.quick_worker", str(point / POINT)]

    return command


@pytest.mark.processes
def test_killed_with_nine_and_resumed(tmp_path: Path) -> None:
    """The command itself, its process killed while a worker is at it: the points that were done are not run again."""
    file, out = write(tmp_path), tmp_path / "runs"
    child = os.fork()
    if not child:
        local.worker_command = endless_after_one(out)
        main(["sweep", str(file), "--set", "workload.output_tokens=2,3", "--out", str(out), "--json"])
        os._exit(0)
    until(lambda: list(out.glob("*/points/*/stayed")), lambda: os.waitpid(child, os.WNOHANG) == (0, 0))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    (folder,) = (tmp_path / "runs").iterdir()
    before = {point: (point / OUTCOME).read_bytes() for point in folder.glob("points/*") if (point / OUTCOME).exists()}
    assert len(before) == 1
    answer("sweep --resume", folder)
    assert {row.state for row in read_rows(SweepFolder.read(folder))} == {"done"}
    assert all((point / OUTCOME).read_bytes() == outcome for point, outcome in before.items())
    complete = [run for run in folder.glob(f"points/*/{RUN_NAME}-*") if not (run / "INCOMPLETE").exists()]
    assert len(complete) == 2


@pytest.mark.processes
def test_a_local_worker_that_is_killed_has_no_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = planned(tmp_path, SIZES)
    sweep.write()
    ended: list[Path] = []
    place = make_executor(LocalSweepConfig(jobs=2))
    broken = tmp_path / "broken"
    (broken / "sitecustomize.py").parent.mkdir()
    (broken / "sitecustomize.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    monkeypatch.setenv("PYTHONPATH", str(broken))
    place.run([point.folder for point in sweep.points], ended.append)
    assert sorted(ended) == sorted(point.folder for point in sweep.points)
    assert {PointResult.read(folder) for folder in ended} == {None}


def test_an_exception_ends_local_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(folder: Path) -> None:
        raise KeyboardInterrupt

    started: list[subprocess.Popen] = []

    def start(point: Path) -> subprocess.Popen:
        started.append(subprocess.Popen(["true"] if point.name == "quick" else ["sleep", "600"]))
        return started[-1]

    place = LocalSweepExecutor(LocalSweepConfig(jobs=3))
    monkeypatch.setattr(place, "_start", start)
    with pytest.raises(KeyboardInterrupt):
        place.run([tmp_path / name for name in ("slow", "quick", "slower", "later")], interrupted)
    assert len(started) == 3 and all(worker.poll() is not None for worker in started)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lokal", "'lokal' is none of local, ray, slurm; did you mean 'local'"),
        ("{kind: local, jobz: 2}", "jobz: unknown key; did you mean 'jobs'"),
        ("{kind: ray, processes: 2}", "processes: a point cannot run on several processes yet"),
    ],
)
def test_a_wrong_place(text: str, message: str) -> None:
    refuses(message, parse_executor, text)
