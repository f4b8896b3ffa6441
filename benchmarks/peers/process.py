"""Run one script in a separate process with its own environment and a time limit, and return its answer or the reason
of its failure."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.peers.catalog import SCRIPTS

VERSIONS = """import json, sys; from importlib import metadata
have = {each.name.lower().replace("_", "-"): each.version for each in metadata.distributions() if each.name}
print(json.dumps([sys.version, {name: have.get(name) for name in sys.argv[1:]}]))"""
MAX_ERROR_LINES = 3  # lines of a failed process's output, in its reason
MAX_REASON_CHARACTERS = 400  # of a reason
THREAD_POOL_PREFIXES = ("OMP", "MKL", "OPENBLAS", "NUMEXPR", "VECLIB", "RAYON")
OFFLINE_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
}


def run_script(
    python: str,
    script: str,
    job: dict,
    *,
    threads: int,
    packages: Sequence[str] = (),
    timeout: float,
    environment: Mapping[str, str] | None = None,
    scripts: Path = SCRIPTS,
) -> dict:
    """Run `script` on `job` in a separate process and return its JSON answer (see scripts/peer_protocol.py).

    Any failure is returned as an answer too: status `failed`, with the last lines of the process's output as the
    reason.

    Args:
        python: The interpreter.
        script: File name in `scripts`.
        job: The job, as JSON on its input.
        threads: Size of every thread pool, and number of cores.
        packages: Distributions whose versions are reported.
        timeout: Seconds.
        environment: Further environment variables.
        scripts: Folder of the script.
    """
    job = {**job, "threads": threads, "cores": first_cores(threads), "packages": list(packages)}
    try:
        answer = _answer([python, str(scripts / script)], job, timeout, script_environment(threads, environment or {}))
    except OSError as error:
        answer = {"status": "failed", "reason": f"{python} could not be started ({error.strerror})"}
    return {**answer, "reason": strip_folders(answer["reason"])} if "reason" in answer else answer


@functools.cache
def installed(python: str, packages: tuple[str, ...]) -> str:
    """Return the versions of the distributions installed in the interpreter `python`, as JSON; empty if the interpreter
    does not start."""
    try:
        done = subprocess.run(
            [python, "-c", VERSIONS, *packages],
            capture_output=True,
            text=True,
            env=script_environment(1, {}),
            check=False,
        )
    except OSError:
        return ""
    return done.stdout.strip()


def strip_folders(text: str) -> str:
    """Return `text` on one line, shortened, with each path cut to its last component, so that records contain no paths
    of this machine."""
    return " ".join(re.sub(r"(?<![\w.:/])(?:/[^\s/:'\"]+)+/(?=[^\s/])", "", text).split())[:MAX_REASON_CHARACTERS]


def first_cores(threads: int) -> list[int]:
    """Return the numbers of the cores that each peer is pinned to, as many as `threads`; empty if the system cannot pin
    processes."""
    return sorted(os.sched_getaffinity(0))[:threads] if hasattr(os, "sched_getaffinity") else []


def script_environment(threads: int, more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables for another tool's interpreter: ours without PYTHONPATH and PYTHONHOME, offline,
    and with every thread pool set to `threads`."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return {
        **kept,
        **{f"{pool}_NUM_THREADS": str(threads) for pool in THREAD_POOL_PREFIXES},
        **OFFLINE_ENVIRONMENT,
        **more,
    }


def _answer(command: list[str], job: dict, timeout: float, environment: dict[str, str]) -> dict:
    # A session of its own, so that helpers of a tool end with it.
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            out, said = process.communicate(json.dumps(job).encode(), timeout)
        except subprocess.TimeoutExpired:
            _end(process)
            return {"status": "failed", "reason": f"no answer within {timeout:g} s"}
        except BaseException:
            _end(process)
            raise
    lines = [line.strip() for line in said.decode(errors="replace").splitlines() if line.strip()]
    try:
        return json.loads(out)
    except ValueError:
        last = " | ".join(lines[-MAX_ERROR_LINES:]) or "it said nothing"
        return {"status": "failed", "reason": f"ended with {_code(process.returncode)} and no answer: {last}"}


def _end(process: subprocess.Popen) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _code(code: int) -> str:
    return f"code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
