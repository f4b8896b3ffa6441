"""Compare real runs with simulated ones, whose step times were fitted to other requests.

    python -m experiments.agreement

Each repetition computes twice: requests with another seed, to whose steps a table is fitted, then the requests
themselves, which are also simulated with that table. Time is the process's own processor time without pauses, which
reduces the effect of other processes. Rule, written before the run: TTFT and TPOT, p50 and p90, differ by at most 15%
in the median of five repetitions.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from workbench.engine.runner import Runner
from workbench.experiment.build import requests_of, runner_for
from workbench.experiment.experiment import Experiment
from workbench.machine.ceilings import intra_op_threads
from workbench.measure.jobs import request_metrics_of
from workbench.measure.rounds import run_requests
from workbench.measure.serving import TrafficWorkload, arrivals_of
from workbench.measure.simulated import instance_spec_for
from workbench.runs.metrics import distribution, summarize
from workbench.simulate.fleet import Fleet, InstancePool
from workbench.simulate.source import OpenLoopSource
from workbench.simulate.step_times import StepTimeModel, fit_step_times
from workbench.trace.recorder import Recorder

METRICS = [(name, q) for name in ("ttft_s", "tpot_s") for q in ("p50", "p90")]
REPETITIONS, TOLERANCE = 5, 0.15


class ProcessClock:
    """A clock that counts only the processor seconds of this process, plus the seconds that it would have slept."""

    def __init__(self) -> None:
        self._waited = 0.0

    def __call__(self) -> float:
        return time.process_time() + self._waited

    def sleep(self, seconds: float) -> None:
        self._waited += seconds


def run_real(runner: Runner, experiment: Experiment) -> Recorder:
    """Run the experiment's requests on the runner, and return a recorder with its events."""
    recorder = Recorder()
    requests = requests_of(experiment, runner.tokenizer, runner.model.spec.vocab_size)
    runner.set_listener(recorder.record)
    run_requests(runner, requests, "", False)
    runner.set_listener(None)
    return recorder


def run_simulated(experiment: Experiment, times: StepTimeModel) -> dict[str, dict]:
    """Simulate the same requests with the step times `times`, and return the distributions of TTFT and TPOT."""
    assert isinstance(experiment.workload, TrafficWorkload)
    clock = experiment.with_("executor={kind: simulated, hardware: h100}")  # of which only the memory is taken
    machine = replace(instance_spec_for(clock), times=times)
    fleet = Fleet(OpenLoopSource(arrivals_of(experiment.workload)), InstancePool(machine, 1)).run()
    figures = [request_metrics_of(job) for job in fleet.jobs]
    return {name: distribution(each[name] for each in figures) for name in ("ttft_s", "tpot_s")}


def repetition(runner: Runner, experiment: Experiment, number: int) -> dict[str, dict[str, float]]:
    """Return real and simulated TTFT and TPOT of the requests with seed `number`, and the relative error of the
    simulated values."""
    seeded = experiment.with_(f"workload.seed={number}")
    times = fit_step_times(run_real(runner, experiment.with_(f"workload.seed={1000 + number}")).steps())
    recorder = run_real(runner, seeded)
    real = summarize(recorder.requests(), recorder.steps(), recorder.tokens())
    clock = run_simulated(seeded, times)
    return {
        f"{name}_{q}": {
            "real": real[name][q], "simulated": clock[name][q], "off": clock[name][q] / real[name][q] - 1,
        }
        for name, q in METRICS
    }  # fmt: skip


def verdict(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the relative error of each simulated figure, the median over the repetitions, and whether all are within
    the tolerance."""
    off = {f"{name}_{q}": median(row[f"{name}_{q}"]["off"] for row in rows) for name, q in METRICS}
    return {"off": off, "within": all(abs(each) <= TOLERANCE for each in off.values())}


def main() -> None:
    experiment = Experiment.from_file(Path(__file__).with_name("agreement.yaml"))
    own, rows = ProcessClock(), []
    with intra_op_threads(experiment.measure.threads):
        runner = runner_for(experiment, clock=own, sleep=own.sleep)
        run_real(runner, experiment)  # compiles and touches everything once
        for number in range(REPETITIONS):
            rows.append(row := repetition(runner, experiment, number))
            for name, found in row.items():
                ms = found["real"] * 1e3, found["simulated"] * 1e3
                print(f"{number}  {name}: {ms[0]:.1f} ms, simulated {ms[1]:.1f} ms ({found['off']:+.1%})", flush=True)
    print(json.dumps(verdict(rows), indent=2))


if __name__ == "__main__":
    main()
