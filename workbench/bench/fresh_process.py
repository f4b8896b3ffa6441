"""Measure a model in a separate process: the time from process start to the first tokens, and the memory during decode.

`python -m workbench.bench.fresh_process` reads one job in JSON from stdin and prints one result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from statistics import median
from typing import Any

from workbench.errors import WorkbenchError
from workbench.machine.environment import child_environment
from workbench.machine.processor import allocated_weight_bytes, peak_bytes, resident_bytes
from workbench.trace.events import Decoded, Finished, Stepped

COLD_PROMPT_TOKENS = 32
TINY_MODEL = "shape:tiny"  # run before memory is measured, so that code and compilers do not count as the model's


def cold_start(settings: Mapping[str, Any], threads: int) -> dict[str, dict[str, float]]:
    """Return the seconds from process start to four moments: import done, model loaded, first token, second token.

    `cold` is a process with empty compile caches, `warm` a second process with the caches of the first. `settings` are
    arguments of `workbench.load`."""
    with tempfile.TemporaryDirectory(prefix="workbench-cold-") as folder:
        places = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "WORKBENCH_CACHE_DIR": f"{folder}/workbench"}
        job = {"settings": dict(settings), "threads": threads, "batch": 1, "prompt": COLD_PROMPT_TOKENS, "output": 2}
        return {name: in_fresh_process(job, places)["seconds"] for name in ("cold", "warm")}


def memory_in_decode(settings: Mapping[str, Any], threads: int, batch: int, prompt: int, output: int) -> dict[str, Any]:
    """Return the bytes of weights, cache and activations while a batch decodes, by formula and as measured, and the
    process's peak."""
    job = {"settings": dict(settings), "threads": threads, "batch": batch, "prompt": prompt, "output": output}
    return in_fresh_process({**job, "small_first": True})["memory"]


def in_fresh_process(job: Mapping[str, Any], environment_variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run `job` in a new process and return its result. Raises WorkbenchError with the last lines of its output if it
    fails."""
    command = [sys.executable, "-m", "workbench.bench.fresh_process"]
    done = subprocess.run(
        command, input=json.dumps({**job, "began": time.time()}), capture_output=True, text=True,
        env=child_environment(**(environment_variables or {})), check=False,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        words = (done.stderr.strip().splitlines() or ["no words"])[-1]
        raise WorkbenchError(f"a fresh process with {job['settings']} ended with {done.returncode}: {words}")
    return json.loads(lines[-1])


def run_job(job: Mapping[str, Any]) -> dict[str, Any]:
    """Run a job in this process; return its `seconds` since process start (cold start), or its `memory`."""
    import torch

    from workbench.model.memory import activation_bytes

    torch.set_num_threads(job["threads"])
    seconds = {"imported": time.time() - job["began"]}
    if job.get("small_first"):
        import torch._inductor.compile_fx

        _run({**job, "settings": {**job["settings"], "model": TINY_MODEL}, "prompt": 8, "output": 4}, {})
    before = resident_bytes()
    runner, steps = _run(job, seconds)
    formula = {
        "weights_bytes": allocated_weight_bytes(runner),
        "cache_bytes": max(step.kv_bytes for step, _ in steps),
        "activations_bytes": activation_bytes(runner.model.spec, job["batch"], runner.model.dtype.itemsize),
    }
    resident = [size for step, size in steps if step.phase == "decode"]
    memory = {
        "batch": job["batch"],
        **formula,
        "formula_bytes": sum(formula.values()),
        "measured_bytes": int(median(resident)) - before if resident else None,
        "before_load_bytes": before,
        "process_peak_bytes": peak_bytes(),
    }
    return {"seconds": seconds, "memory": memory}


def _run(job: Mapping[str, Any], seconds: dict[str, float]) -> tuple[Any, list[tuple[Stepped, int]]]:
    """Return the runner, and its steps with the resident bytes after each."""
    import workbench
    from workbench.request import Request, SamplingParameters

    batch, prompt, output = job["batch"], job["prompt"], job["output"]
    runner = workbench.load(**job["settings"], max_num_seqs=batch, pages=batch * -(-(prompt + output) // 64))
    seconds["loaded"] = time.time() - job["began"]
    vocab = runner.model.spec.vocab_size
    sampling = SamplingParameters(temperature=0.0, max_tokens=output, ignore_eos=True)
    requests = [Request(str(i), tuple((7 * i + j) % vocab for j in range(prompt)), sampling) for i in range(batch)]
    steps: list[tuple[Stepped, int]] = []
    for event in runner.stream(requests):
        if isinstance(event, Decoded) and event.index < 2:
            seconds.setdefault(("first_token", "second_token")[event.index], time.time() - job["began"])
        elif isinstance(event, Finished) and event.error:
            raise WorkbenchError(event.error)
        elif isinstance(event, Stepped):
            steps.append((event, resident_bytes()))
    return runner, steps


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep other output out of the result
    print(json.dumps(run_job(json.load(sys.stdin))), file=answers, flush=True)
