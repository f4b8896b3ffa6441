"""Submit points as jobs of a Slurm cluster; resuming the sweep later collects their outcomes.

A point's `job.json` names its job, from submission until the job has written an outcome. A resumed sweep queries that
job: a pending or running job is left alone; a job that is gone without an outcome has died.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError, installed_by
from workbench.files import read_json_file
from workbench.progress import Progress
from workbench.runs import process as alive
from workbench.sweep import bound
from workbench.sweep.point import LOG, OUTCOME, write_json
from workbench.sweep.settings import SlurmSweepConfig

JOB_FILE = "job.json"
MAX_ARRAY_JOBS = 500  # jobs submitted as one array; Slurm allows 1,001 unless its administrator says otherwise


@dataclass(frozen=True)
class SlurmJob:
    """The Slurm job that runs a point; `process`, if set, is a process of this machine in its place."""

    id: str
    submitted: str
    process: dict[str, Any] | None = None

    @classmethod
    def read(cls, point: Path) -> SlurmJob | None:
        try:
            return cls(**read_json_file(point / JOB_FILE))
        except (ValueError, TypeError):
            return None


class SlurmSweepExecutor:
    """Run one job per point. `run` returns once all are submitted; outcomes are read when the sweep is resumed."""

    def __init__(self, setting: SlurmSweepConfig) -> None:
        self.setting = setting
        self.submitit = _import_submitit()

    def run(self, points: Sequence[Path], on_end: Callable[[Path], None]) -> None:
        entered = {point: job for point in points if (job := SlurmJob.read(point))}
        present = self._present_jobs(entered.values())
        gone = [point for point, job in entered.items() if job.id not in present]
        fresh = [point for point in points if point not in entered]
        for start in range(0, len(fresh), MAX_ARRAY_JOBS):
            self._submit(fresh[start : start + MAX_ARRAY_JOBS])
        self._tell(len(fresh), len(entered) - len(gone))
        for point in gone:
            if not (point / OUTCOME).exists():
                self._note(point, entered[point])
            (point / JOB_FILE).unlink(missing_ok=True)
            on_end(point)

    def _submit(self, points: Sequence[Path]) -> None:
        """Submit points as one job array, and store the job ids as soon as they are known."""
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
            self.submitit.core.utils.cloudpickle.register_pickle_by_value(bound)  # a job imports the workbench itself
            with executor.batch():
                jobs = [
                    executor.submit(bound.run_child_job, JOB_FILE, OUTCOME, *bound.worker_arguments(point))
                    for point in points
                ]
        except (RuntimeError, ValueError, NameError, AssertionError, OSError) as error:
            reason = " ".join(str(error).split())
            raise WorkbenchError(f"executor slurm: {len(points)} points cannot be submitted ({reason})") from error
        submitted = datetime.now(UTC).isoformat(timespec="seconds")
        for point, job in zip(points, jobs, strict=True):
            process = alive.describe_process(int(job.job_id)) if setting.local else None
            write_json(point / JOB_FILE, asdict(SlurmJob(job.job_id, submitted, process)))
            if (point / OUTCOME).exists():  # it has ended meanwhile
                (point / JOB_FILE).unlink(missing_ok=True)

    def _present_jobs(self, jobs: Iterable[SlurmJob]) -> set[str]:
        """Return the ids of pending and running jobs."""
        jobs = list(jobs)
        here = {job.id for job in jobs if alive.is_running(job.process)}
        if all(job.process for job in jobs) or self.setting.local:
            return here
        command = ["squeue", "--me", "--noheader", "--array", "--format=%i"]
        try:
            listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError) as error:
            message = getattr(error, "stderr", "") or str(error)
            raise WorkbenchError(
                f"executor slurm: cannot tell which jobs still wait or run ({message.strip()}); resume the sweep where "
                "squeue works"
            ) from None
        return here | set(listed.split())

    def _note(self, point: Path, job: SlurmJob) -> None:
        with (point / LOG).open("a", encoding="utf-8") as log:
            log.write(f"slurm: job {job.id}, submitted {job.submitted}, is gone without an outcome\n")

    def _tell(self, fresh: int, under_way: int) -> None:
        counts = {"submitted": fresh, "already waiting or running": under_way}
        if message := ", ".join(f"{count:,} {what}" for what, count in counts.items() if count):
            Progress.write(f"slurm: {message}; resume the sweep to collect their results", file=sys.stderr)


def _import_submitit() -> Any:
    with installed_by("cluster", "executor slurm"):
        import submitit
    return submitit
