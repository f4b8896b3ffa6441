"""Measure how threads should wait for each other, on a quiet machine and beside processes that keep the cores busy.

    python -m experiments.thread_waiting                       # all settings beside 0, 1 and 3 busy processes
    python -m experiments.thread_waiting --busy 3 --json --out experiments/records

Each setting is a process of its own, since libgomp reads its variables when it is loaded. All load the model on each
backend and warm up; then they are asked in turn, round by round, so that what else the machine did met all of them. A
busy process is an endless loop, and shares the scheduler's group with the measured ones. A figure is the mean of what
lasted at least `LEAST_SECONDS`: the median of single gaps would hide the long ones.

OMP_DYNAMIC is no candidate: libgomp then gives fewer threads than asked, and oneDNN leaves the work of the others out
(torch 2.13: a product of two matrices in bfloat16 has NaN).

The rule, written before the run: the setting to take is within 3% of the best when quiet, or within the spread of the
best one's rounds where that is larger, and within twice the best beside one and three busy processes: medians, on every
backend, in decode and prefill. Where none is, take the one whose worst ratio when quiet is least among those within
twice the best when busy.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from workbench.display import Table
from workbench.machine.environment import child_environment, environment

QUESTION = "How should threads wait for each other?"
BACKENDS = ("eager", "inductor", "mlir")
PROMPTS = {"decode": 128, "prefill": 384}  # tokens
DECODED = 24  # tokens
LEAST_SECONDS = 0.3
ROUNDS = 5
WARM_UPS = 2
QUIET_RATIO, BUSY_RATIO = 1.03, 2.0  # of the best, by the rule
VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_DYNAMIC", "OMP_NUM_THREADS")
SETTINGS: Mapping[str, Mapping[str, str]] = {
    "adaptive": {},  # what the workbench does where no variable is set (workbench/executors/thread_waiting.py)
    "spin 300000 (libgomp's own)": {"GOMP_SPINCOUNT": "300000"},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "spin 1000": {"GOMP_SPINCOUNT": "1000"},
    "spin 2000": {"GOMP_SPINCOUNT": "2000"},
    "spin 3000": {"GOMP_SPINCOUNT": "3000"},
    "spin 5000": {"GOMP_SPINCOUNT": "5000"},
    "spin 10000": {"GOMP_SPINCOUNT": "10000"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
Row = dict[str, Any]


class Worker:
    """A process with the model loaded on each backend, whose threads wait as its environment variables say."""

    def __init__(self, model: str, variables: Mapping[str, str]):
        inherited = {name: value for name, value in child_environment().items() if name not in VARIABLES}
        command = [sys.executable, "-m", "experiments.thread_waiting", "--worker", model]
        self._process = subprocess.Popen(
            command, env={**inherited, **variables}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, backend: str, phase: str) -> float:
        """Return the milliseconds of a decoded token (phase decode) or of a prompt (phase prefill)."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps([backend, phase]), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process has ended with {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Keep `count` processes in endless loops within the `with` block."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def measure_all(model: str, settings: Sequence[str], counts: Sequence[int], rounds: int) -> list[Row]:
    """Return a row for each number of busy processes, backend, phase and setting, with the milliseconds of each
    round."""
    rows: dict[tuple, Row] = {}
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for name in settings:  # one after another, so that no start makes another's warm-up a busy one
            workers[name] = worker = Worker(model, SETTINGS[name])
            stack.callback(worker.close)
            for _ in range(WARM_UPS):
                _ask_all(worker)
        for count in counts:
            with busy_processes(count):
                for _ in range(rounds):
                    for backend, phase, name in ((b, p, n) for b in BACKENDS for p in PROMPTS for n in workers):
                        key = {"busy": count, "backend": backend, "phase": phase, "setting": name}
                        row = rows.setdefault(tuple(key.values()), {**key, "milliseconds": []})
                        row["milliseconds"].append(workers[name].ask(backend, phase))
    return list(rows.values())


def _ask_all(worker: Worker) -> None:
    for backend in BACKENDS:
        for phase in PROMPTS:
            worker.ask(backend, phase)


@dataclass(frozen=True)
class Judged:
    """The result of one setting: its worst ratio to the best setting's median when quiet and when busy, and where it
    misses the rule."""

    setting: str
    quiet: float
    busy: float
    quiet_misses: tuple[str, ...]
    busy_misses: tuple[str, ...]


def judge(rows: Sequence[Row]) -> list[Judged]:
    """Judge each setting by the rule of this module's docstring."""
    cells: dict[tuple, dict[str, list[float]]] = {}
    for row in rows:
        cells.setdefault((row["busy"], row["backend"], row["phase"]), {})[row["setting"]] = row["milliseconds"]
    found = []
    for setting in dict.fromkeys(row["setting"] for row in rows):
        worst, misses = {True: 0.0, False: 0.0}, {True: [], False: []}
        for (count, backend, phase), cell in cells.items():
            best = min(cell.values(), key=median)
            limit = max(QUIET_RATIO * median(best), max(best)) if count == 0 else BUSY_RATIO * median(best)
            quiet, value = count == 0, median(cell[setting])
            worst[quiet] = max(worst[quiet], value / median(best))
            if value > limit:
                misses[quiet].append(f"{backend} {phase}" + ("" if quiet else f" beside {count}"))
        found.append(Judged(setting, worst[True], worst[False], tuple(misses[True]), tuple(misses[False])))
    return found


def table(rows: Sequence[Row]) -> Table:
    cells: dict[tuple, Row] = {}
    for row in rows:
        key = {name: row[name] for name in ("busy", "backend", "phase")}
        low, middle, high = min(row["milliseconds"]), median(row["milliseconds"]), max(row["milliseconds"])
        cell = cells.setdefault(tuple(key.values()), key)
        cell[row["setting"]] = f"{middle:.3g} ({low:.3g} to {high:.3g})"
    return Table.from_dicts(list(cells.values()))


def serve(model: str) -> None:
    """Answer the questions that `Worker.ask` sends to this process."""
    import workbench
    from workbench.request import Request, SamplingParameters
    from workbench.trace.events import Decoded

    runners: dict[str, Any] = {backend: workbench.load(model, backend=backend, max_num_seqs=1) for backend in BACKENDS}
    number = 0

    def once(backend: str, phase: str) -> float:
        nonlocal number
        number += 1  # no prompt begins like an earlier one: nothing is found in the prefix cache
        runner = runners[backend]
        vocab = runner.model.spec.vocab_size
        prompt = tuple((7 * position + 13 * number) % vocab for position in range(PROMPTS[phase]))
        sampling = SamplingParameters(temperature=0.0, max_tokens=DECODED if phase == "decode" else 1, ignore_eos=True)
        times = [time.perf_counter()]
        for event in runner.stream([Request(f"{number}", prompt, sampling)]):
            if isinstance(event, Decoded):
                times.append(time.perf_counter())
        return times[1] - times[0] if phase == "prefill" else (times[-1] - times[1]) / (DECODED - 1)

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other output is no answer
    for line in sys.stdin:
        backend, phase = json.loads(line)
        seconds, began = [], time.perf_counter()
        while time.perf_counter() - began < LEAST_SECONDS:
            seconds.append(once(backend, phase))
        print(json.dumps(1000 * sum(seconds) / len(seconds)), file=answers, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=QUESTION)
    parser.add_argument("--worker", metavar="MODEL", help=argparse.SUPPRESS)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), metavar="NAME")
    parser.add_argument("--busy", nargs="+", type=int, default=[0, 1, 3], help="numbers of busy processes")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.worker:
        serve(given.worker)
        return
    machine = environment()
    rows = measure_all(given.model, given.settings, given.busy, given.rounds)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    record = {
        "question": QUESTION, "date": date, "model": given.model, "rows": rows, "environment": machine,
        "settings": SETTINGS,
    }  # fmt: skip
    if given.out:
        from workbench.runs.folder import write_dated_record

        print(f"record  {write_dated_record(record, given.out, 'thread_waiting')}", file=sys.stderr)
    print(json.dumps(record, indent=2) if given.json else table(rows).text())
    if not given.json:
        print(Table.from_dicts([asdict(judged) for judged in judge(rows)]).text())


if __name__ == "__main__":
    main()
