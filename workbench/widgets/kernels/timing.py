"""Time backends in a separate process, so that compiling and serving here do not disturb the timing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from workbench.errors import WorkbenchError
from workbench.machine.environment import child_environment
from workbench.widgets.job import Job


class BackendTimingProcess:
    """A process that times one case on several backends, `seconds` for each, like `workbench kernels bench`.

    It starts at once; `on_record` is called at the end. With `ceilings` it measures this machine's ceilings, too."""

    def __init__(
        self,
        operator: str,
        case: str,
        backends: Sequence[str],
        seconds: float,
        ceilings: bool,
        on_record: Callable[[], None],
    ):
        self.record: dict[str, Any] = {}
        self.error = ""
        self._on_record = on_record
        job = {"operator": operator, "case": case, "backends": list(backends), "seconds": seconds, "ceilings": ceilings}
        command = [sys.executable, "-m", "workbench.widgets.kernels.timing", json.dumps(job)]
        self._process = subprocess.Popen(
            command, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=child_environment(),
        )  # fmt: skip
        self._job = Job(self._read, self._end, self._process.terminate, "backends' timing").start()

    @property
    def done(self) -> bool:
        return self._job.done

    def wait(self, seconds: float | None = None) -> bool:
        return self._job.wait(seconds)

    def stop(self) -> None:
        self._job.stop()

    def _read(self, _: Job) -> None:
        out, words = self._process.communicate()
        if self._process.returncode:
            raise WorkbenchError((words.strip().splitlines() or ["no message"])[-1])
        self.record = json.loads(out)

    def _end(self, job: Job) -> None:
        if job.error:
            self.error = "the timing was stopped" if job.stopped else f"the timing failed: {job.error}"
        self._on_record()


def time_backends(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record like that of `kernel_bench`; without ceilings it has fewer fields."""
    from compiled_kernels.backends import Backend
    from compiled_kernels.cases import case_of, suite_of
    from workbench.bench.kernels import kernel_bench

    suite = suite_of(job["operator"])
    case, backends = case_of(suite, job["case"]), tuple(Backend(name) for name in job["backends"])
    if job["ceilings"]:
        return kernel_bench([(suite, case)], backends, budget_seconds=job["seconds"])
    import torch

    from compiled_kernels.measure import measure
    from workbench.bench.kernels import timing_figures
    from workbench.machine.environment import environment
    from workbench.machine.processor import cpu_times, others_cpu_share

    before = cpu_times()
    found = measure(suite, case, backends, job["seconds"])
    busy, rows = others_cpu_share(before), []
    eager = found.timings.get(Backend.EAGER)
    for backend in backends:
        row: dict[str, Any] = {"operator": suite.operator, "backend": str(backend), "case": case.name}
        if timing := found.timings.get(backend):
            row |= timing_figures(case, found, timing)
            row["speedup_over_eager"] = eager.seconds / timing.seconds if eager else None
        rows.append(row if timing else {**row, "reason": found.refused.get(backend, "")})
    about = {"threads": torch.get_num_threads(), "others_cpu_share": busy, "environment": environment()}
    return {**about, "date": about["environment"]["date"], "rows": rows}


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other prints go to stderr, so that stdout holds the record only
    print(json.dumps(time_backends(json.loads(sys.argv[1]))), file=answers, flush=True)
