"""Submit points as jobs of a Slurm cluster; resuming the sweep later collects their outcomes.

A point's `job.json` names its job, from submission until the job has left an outcome. A resumed sweep asks for that
job: one that waits or runs is left alone, one that is gone without an outcome has died.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError
from workbench.files import read_json_file
from workbench.progress import Progress
from workbench.study import alive
from workbench.sweep import bound
from workbench.sweep.point import LOG, OUTCOME, write_json
from workbench.sweep.settings import SlurmPart

JOB = "job.json"
ARRAY = 500  # jobs submitted as one array; Slurm allows 1,001 unless its administrator says otherwise


@dataclass(frozen=True)
class Job:
    """A job of Slurm's for a point, or with `process` a process of this machine in its place."""

    id: str
    submitted: str
    process: dict[str, Any] | None = None

    @classmethod
    def read(cls, point: Path) -> Job | None:
        try:
            return cls(**read_json_file(point / JOB))
        except (ValueError, TypeError):
            return None


class SlurmPlace:
    """Run one job a point. `run` returns once all are submitted; their outcomes are read when the sweep is resumed."""

    def __init__(self, setting: SlurmPart) -> None:
        self.setting = setting
        self.submitit = _imported()

    def run(self, points: Sequence[Path], ended: Callable[[Path], None]) -> None:
        entered = {point: job for point in points if (job := Job.read(point))}
        present = self._present(entered.values())
        gone = [point for point, job in entered.items() if job.id not in present]
        fresh = [point for point in points if point not in entered]
        for start in range(0, len(fresh), ARRAY):
            self._submit(fresh[start : start + ARRAY])
        self._tell(len(fresh), len(entered) - len(gone))
        for point in gone:
            if not (point / OUTCOME).exists():
                self._note(point, entered[point])
            (point / JOB).unlink(missing_ok=True)
            ended(point)

    def _submit(self, points: Sequence[Path]) -> None:
        """Submit points as one array, and store the jobs' ids as soon as they are known."""
        setting = self.setting
        try:
            executor = self.submitit.AutoExecutor(
                folder=points[0].resolve().parent.parent / setting.folder, cluster="local" if setting.local else "slurm"
            )
            executor.update_parameters(
                name="workbench", timeout_min=setting.timeout_min, cpus_per_task=setting.cpus_per_task,
                mem_gb=setting.mem_gb, gpus_per_node=setting.gpus_per_node, slurm_partition=setting.partition,
                **setting.parameters,
            )  # fmt: skip
            self.submitit.core.utils.cloudpickle.register_pickle_by_value(bound)  # a job finds the workbench by itself
            with executor.batch():
                jobs = [executor.submit(bound.carry_out_job, JOB, OUTCOME, *bound.told(point)) for point in points]
        except (RuntimeError, ValueError, NameError, AssertionError, OSError) as error:
            reason = " ".join(str(error).split())
            raise WorkbenchError(f"executor slurm: {len(points)} points cannot be submitted ({reason})") from error
        submitted = datetime.now(UTC).isoformat(timespec="seconds")
        for point, job in zip(points, jobs, strict=True):
            process = alive.process(int(job.job_id)) if setting.local else None
            write_json(point / JOB, asdict(Job(job.job_id, submitted, process)))
            if (point / OUTCOME).exists():  # it has ended meanwhile
                (point / JOB).unlink(missing_ok=True)

    def _present(self, jobs: Iterable[Job]) -> set[str]:
        """Return the ids of jobs that wait or run."""
        jobs = list(jobs)
        here = {job.id for job in jobs if alive.runs(job.process)}
        if all(job.process for job in jobs) or self.setting.local:
            return here
        command = ["squeue", "--me", "--noheader", "--array", "--format=%i"]
        try:
            listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError) as error:
            told = getattr(error, "stderr", "") or str(error)
            raise WorkbenchError(
                f"executor slurm: cannot tell which jobs still wait or run ({told.strip()}); resume the sweep where "
                "squeue works"
            ) from None
        return here | set(listed.split())

    def _note(self, point: Path, job: Job) -> None:
        with (point / LOG).open("a", encoding="utf-8") as log:
            log.write(f"slurm: job {job.id}, submitted {job.submitted}, is gone without an outcome\n")

    def _tell(self, fresh: int, under_way: int) -> None:
        counts = {"submitted": fresh, "already waiting or running": under_way}
        if told := ", ".join(f"{count:,} {what}" for what, count in counts.items() if count):
            Progress.write(f"slurm: {told}; resume the sweep to collect what they leave", file=sys.stderr)


def _imported() -> Any:
    try:
        import submitit
    except ImportError as error:
        needs = f"needs submitit ({error}); pip install 'inference-workbench[cluster]'"
        raise WorkbenchError(f"executor slurm: {needs}") from None
    return submitit
