"""Jobs that are submitted by one process and collected by another: submitit's local ones, and a Slurm that pretends."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.helpers.processes import python
from tests.helpers.refusals import refuses
from tests.patience import until
from tests.sweep.quick import began, ended, quick_sweep, quick_workers, states
from workbench.sweep.folder import SweepFolder
from workbench.sweep.run import make_executor, read_rows, run_sweep
from workbench.sweep.settings import parse_executor
from workbench.sweep.slurm import JOB_FILE, SlurmJob

pytest.importorskip("submitit", reason="pip install 'submitit>=1.5'")
__all__ = ["quick_workers"]

ROOT = Path(__file__).parents[2]
LOCAL = "{kind: slurm, local: true}"
SUBMIT = """
import sys
from pathlib import Path
from tests.patience import until
from tests.sweep.quick import quick_command
from workbench.sweep import executor as places
from workbench.sweep.run import make_executor
from workbench.sweep.folder import SweepFolder
from workbench.sweep.run import run_sweep
from workbench.sweep.settings import parse_executor

places.worker_command = quick_command
rows = run_sweep(SweepFolder.read(Path(sys.argv[1])), make_executor(parse_executor(sys.argv[2])))
print([row.state for row in rows])
"""


def submit_and_leave(sweep: SweepFolder) -> str:
    """Submit from a process of its own and return its output; the process has ended then, its jobs have not."""
    done = python("-c", SUBMIT, sweep.path, LOCAL, cwd=ROOT, check=True)
    return done.stdout + done.stderr


@pytest.mark.processes
def test_submitted_left_and_collected(tmp_path: Path, quick_workers: None, capfd: pytest.CaptureFixture[str]) -> None:
    sweep = quick_sweep(tmp_path, 3)
    first, *others = [point.folder for point in sweep.points]
    (first / "stay").touch()
    assert "slurm: 3 submitted; resume the sweep to collect" in submit_and_leave(sweep)
    for point in others:
        until((point / "outcome.json").exists)
    until((first / "stayed").exists)
    held = SlurmJob.read(first)
    assert held is not None and held.process is not None
    place = make_executor(parse_executor(LOCAL))
    assert [row.state for row in run_sweep(sweep, place)] == ["to run", "done", "done"]
    assert "slurm: 1 already waiting or running" in capfd.readouterr().err
    assert SlurmJob.read(first) == held and len(began(first)) == 1

    os.kill(held.process["pid"], signal.SIGKILL)  # the job, as a node that goes down would end it
    os.kill(began(first)[0]["pid"], signal.SIGKILL)
    ended(held.process)
    ended(began(first)[0])
    assert [row.state for row in run_sweep(sweep, place)] == ["to run", "done", "done"]
    said = capfd.readouterr().err
    assert "its worker died; it runs again" in said and "slurm: 1 submitted" in said
    until((first / "outcome.json").exists)
    assert [row.state for row in read_rows(sweep)] == ["done"] * 3
    assert states(first) == ["complete", "killed"]
    assert [(states(point), len(began(point))) for point in others] == [(["complete"], 1)] * 2
    assert f"job {held.id}, submitted {held.submitted}, is gone" in (first / "log.txt").read_text()
    until(
        lambda: not list(sweep.path.glob(f"points/*/{JOB_FILE}"))
    )  # one that has left an outcome is not asked for again


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Slurm's commands as far as submitting needs them: nothing runs, and `queue` says what does."""
    commands = tmp_path / "commands"
    commands.mkdir()
    for name, text in {
        "srun": "exit 1",
        "sbatch": f'cp "$1" {commands}/script; echo "Submitted batch job $(wc -l < {commands}/numbers)" '
        f"&& echo >> {commands}/numbers",
        "squeue": f"cat {commands}/queue",
    }.items():
        (commands / name).write_text(f"#!/bin/sh\n{text}\n")
        (commands / name).chmod(0o755)
    (commands / "numbers").write_text("\n" * 70)
    monkeypatch.setenv("PATH", str(commands), prepend=os.pathsep)
    return commands


def test_an_array_of_slurms_is_entered_and_asked_for(
    tmp_path: Path, slurm: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sweep = quick_sweep(tmp_path / "runs", 3)
    setting = parse_executor(
        "{kind: slurm, partition: short, mem_gb: 4, cpus_per_task: 2, parameters: {slurm_account: me}}"
    )
    place = make_executor(setting)
    assert {row.state for row in run_sweep(sweep, place)} == {"to run"}
    points = [point.folder for point in sweep.points]
    assert [job and job.id for job in map(SlurmJob.read, points)] == ["70_0", "70_1", "70_2"]
    script = (slurm / "script").read_text()
    for flag in ("partition=short", "mem=4GB", "cpus-per-task=2", "account=me", "array=0-2%3", "time=60"):
        assert f"#SBATCH --{flag}" in script
    assert len(list((sweep.path / "slurm").glob("*_submitted.pkl"))) == 3

    (slurm / "queue").write_text("70_0\n70_2\n12\n")
    run_sweep(sweep, place)
    assert [job and job.id for job in map(SlurmJob.read, points)] == ["70_0", "71", "70_2"]
    assert "slurm: 2 already waiting or running" in capfd.readouterr().err

    (slurm / "squeue").write_text("#!/bin/sh\necho slurmctld is away >&2; exit 1\n")
    refuses("cannot tell which jobs .*slurmctld is away", run_sweep, sweep, place)
    assert [job and job.id for job in map(SlurmJob.read, points)] == ["70_0", "71", "70_2"]


def test_a_refusal_of_submitit_is_reported(tmp_path: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = quick_sweep(tmp_path / "runs", 1)
    refuses(
        "Unknown argument 'colour'",
        lambda: run_sweep(sweep, make_executor(parse_executor("{kind: slurm, parameters: {slurm_colour: red}}"))),
    )
    (slurm / "sbatch").write_text("#!/bin/sh\necho no such partition >&2; exit 1\n")
    refuses(
        "1 points cannot be submitted .*no such partition",
        lambda: run_sweep(sweep, make_executor(parse_executor("slurm"))),
    )
    (slurm / "srun").unlink()
    refuses('Could not detect "srun"', lambda: run_sweep(sweep, make_executor(parse_executor("slurm"))))
    assert SlurmJob.read(sweep.points[0].folder) is None
