"""Measure the question of `together.yaml`, whether requests served together are faster: `python -m
experiments.together`.

Both sides are the same experiment on the same backend; only `schedule.max_num_seqs` differs (16 or 1). They are run
in turn, after a warm-up of each, and compared by their medians.
"""

from __future__ import annotations

import json
import statistics
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from workbench.experiment.build import requests_of, runner_for
from workbench.experiment.experiment import Experiment
from workbench.machine.environment import environment
from workbench.machine.processor import cpu_times, others_cpu_share
from workbench.measure.rounds import run_requests

HERE = Path(__file__).resolve().parent
PREDICTION = 5.0  # at least: a step of 16 rows reads the weights once, as a step of one does


def measure(experiment: Experiment, repetitions: int) -> dict:
    """Return the tokens per second of both sides, run in turn, and the ratio of their medians."""
    sides = {
        "together": experiment,
        "one after another": experiment.with_("schedule.max_num_seqs=1"),
    }
    runners = {name: runner_for(side) for name, side in sides.items()}
    requests = requests_of(experiment, None, runners["together"].model.spec.vocab_size)
    tokens = sum(request.sampling.max_tokens for request in requests)
    for name, runner in runners.items():
        run_requests(runner, requests[:2] if name != "together" else requests, f"{name}: warm-up", True)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    before = cpu_times()
    for repetition in range(repetitions):
        for name, runner in runners.items():
            seconds[name].append(run_requests(runner, requests, f"{name} {repetition + 1}/{repetitions}", True))
    rates = {name: tokens / statistics.median(values) for name, values in seconds.items()}
    backends = runners["together"].core.backends
    return {
        "backend": {"name": str(backends), "reason": backends.reason},
        "seconds": seconds,
        "tokens_per_s": rates,
        "ratio": rates["together"] / rates["one after another"],
        "others_cpu_share": others_cpu_share(before),
    }


def main(
    set_: Annotated[list[str] | None, typer.Option("--set", help="change a setting of the experiment")] = None,
    repetitions: Annotated[int, typer.Option(help="runs of each side")] = 3,
    out: Annotated[Path, typer.Option(help="folder of the record")] = HERE / "records",
) -> None:
    """Serve 16 requests together and one after another, and record the ratio."""
    experiment = Experiment.from_file(HERE / "together.yaml", tuple(set_ or ()))
    found = measure(experiment, repetitions)
    record = {
        "question": experiment.question,
        "experiment": experiment.model_dump(mode="json"),
        **found,
        "verdict": f"{found['ratio']:.1f} times, predicted at least {PREDICTION:.0f}: "
        + ("holds" if found["ratio"] >= PREDICTION else "refuted"),
        "environment": environment(),
    }
    path = out / f"together-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")
    typer.echo(record["verdict"])
    typer.echo(str(path))


if __name__ == "__main__":
    typer.run(main)
