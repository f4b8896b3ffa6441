"""One script in a process of its own: its surroundings, its time limit, its answer or what it died of."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from workbench.peers.catalog import SCRIPTS

VERSIONS = """import json, sys; from importlib import metadata
have = {each.name.lower().replace("_", "-"): each.version for each in metadata.distributions() if each.name}
print(json.dumps([sys.version, {name: have.get(name) for name in sys.argv[1:]}]))"""
LAST_LINES = 3  # of what a dead process said, in its reason
MOST_LETTERS = 400  # of a reason
POOLS = ("OMP", "MKL", "OPENBLAS", "NUMEXPR", "VECLIB", "RAYON")
QUIET = {
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
    """The answer of `script` to `job` (see scripts/peer_protocol.py).

    Whatever goes wrong is an answer too: status `failed` and the last words of the process as reason.
    """
    job = {**job, "threads": threads, "cores": first_cores(threads), "packages": list(packages)}
    try:
        answer = _answer([python, str(scripts / script)], job, timeout, surroundings(threads, environment or {}))
    except OSError as error:
        answer = {"status": "failed", "reason": f"{python} could not be started ({error.strerror})"}
    return {**answer, "reason": without_folders(answer["reason"])} if "reason" in answer else answer


@functools.cache
def installed(python: str, packages: tuple[str, ...]) -> str:
    """The versions `python` has of these distributions, as JSON; empty where it does not start."""
    try:
        done = subprocess.run(
            [python, "-c", VERSIONS, *packages], capture_output=True, text=True, env=surroundings(1, {}), check=False
        )
    except OSError:
        return ""
    return done.stdout.strip()


def without_folders(text: str) -> str:
    """`text` on one line, short, and each path in it as its last name: records tell no places of this machine."""
    return " ".join(re.sub(r"(?<![\w.:/])(?:/[^\s/:'\"]+)+/(?=[^\s/])", "", text).split())[:MOST_LETTERS]


def first_cores(threads: int) -> list[int]:
    """The cores every peer is held to: as many as threads, or none named where the system cannot."""
    return sorted(os.sched_getaffinity(0))[:threads] if hasattr(os, "sched_getaffinity") else []


def surroundings(threads: int, more: Mapping[str, str]) -> dict[str, str]:
    """Our environment without what would lead a foreign interpreter astray, every thread pool at `threads`."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return {**kept, **{f"{pool}_NUM_THREADS": str(threads) for pool in POOLS}, **QUIET, **more}


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
        last = " | ".join(lines[-LAST_LINES:]) or "it said nothing"
        return {"status": "failed", "reason": f"ended with {_code(process.returncode)} and no answer: {last}"}


def _end(process: subprocess.Popen) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _code(code: int) -> str:
    return f"code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
