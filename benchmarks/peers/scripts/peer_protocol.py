"""Implement the protocol of every peer's script: one job on stdin, one answer on stdout. Standard library only.

    stdin   {"peer", "format", "model", "threads", "cores", "packages", "options", "kind", "prompt" or "repetitions"}
    stdout  {"status": "ok", "versions", "load_seconds", "how", "peak_bytes", and "logits" or
             "warm_up", "measured", "artifacts", "others_cpu_share" (while measuring)}
            {"status": "absent" | "unsupported" | "failed", "reason", "versions"}

`kind` is `logits` (one `prompt`) or `decode`, `prefill`, `mixed` with `repetitions`: each a list of requests
`{"prompt": [id], "output_tokens": n}`, of which the first repetition is the warm-up."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Protocol

PR_SET_PDEATHSIG = 1


class Unsupported(Exception):
    """The tool cannot run this workload or weight format; the message gives the reason."""


class PeerEngine(Protocol):
    """Interface of a tool with the model loaded, which each peer's script implements.

    `how` describes the conditions of the measurements, such as cache format and batching. The optional `artifacts` are
    content hashes of the compiled code that ran."""

    how: str

    def logits(self, prompt: list[int]) -> dict[str, list[float]]:
        """Return logits [vocab] after the last token of `prompt`, by the name of the way in which they were computed.

        `prefill` computes the whole prompt at once. `decode` computes all tokens but the last, and then the last one as
        a decode step over the cache, if the tool lets the caller choose that token."""
        ...

    def generate(self, requests: list[dict]) -> list[list[float]]:
        """Generate greedily to full length. Return for each request the times of its tokens (`time.perf_counter`)."""
        ...


def serve(make: Callable[[dict], PeerEngine]) -> None:
    """Answer the job on stdin with the engine that `make(job)` returns."""
    answer_with(lambda job: _run_job(make, job))


def answer_with(work: Callable[[dict], dict]) -> None:
    """Answer the job on stdin with the result of `work`. Output that libraries print meanwhile is kept out of
    stdout."""
    end_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other writes to stdout, C code's too, go to stderr
    job = json.load(sys.stdin)
    try:
        if job["cores"] and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, job["cores"])
        answer = {"status": "ok", **work(job), "peak_bytes": peak_bytes()}
    except ImportError as error:
        answer = {"status": "absent", "reason": str(error)}
    except Unsupported as error:
        answer = {"status": "unsupported", "reason": str(error)}
    except Exception as error:
        traceback.print_exc()
        answer = {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
    answers.write(json.dumps({**answer, "versions": versions(job["packages"])}))
    answers.close()
    sys.stderr.flush()
    os._exit(0)  # thread pools of some tools crash when they are torn down


def end_with_parent() -> None:
    """End this process when its parent ends, so that an abandoned measurement does not disturb the next one (Linux
    only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _run_job(make: Callable[[dict], PeerEngine], job: dict) -> dict:
    began = time.perf_counter()
    engine = make(job)
    answer: dict = {"load_seconds": time.perf_counter() - began, "how": engine.how}
    if job["kind"] == "logits":
        engine.logits(job["prompt"][::-1])  # a tool's cache of another prompt must not affect these
        return {**answer, "logits": engine.logits(job["prompt"])}
    first, *others = job["repetitions"]
    answer["warm_up"] = measure_requests(engine, job["kind"], first)
    before = processor_seconds()
    answer["measured"] = [measure_requests(engine, job["kind"], each) for each in others]
    answer["artifacts"] = getattr(engine, "artifacts", {})
    return {**answer, "others_cpu_share": others_cpu_share(before, processor_seconds())}


def measure_requests(engine: PeerEngine, kind: str, requests: list[dict]) -> dict:
    """Run one repetition of the requests; return its `tokens` and `seconds`.

    The counted tokens are, for `decode`, output tokens after the first; for `prefill`, prompt tokens until the first
    output token; for `mixed`, all output tokens until the last."""
    began = time.perf_counter()
    times = engine.generate(requests)
    for request, own in zip(requests, times, strict=True):
        if len(own) != request["output_tokens"]:
            raise RuntimeError(f"{request['output_tokens']} output tokens were asked for, {len(own)} came")
    if kind == "decode":
        tokens, seconds = len(times[0]) - 1, times[0][-1] - times[0][0]
    elif kind == "prefill":
        tokens, seconds = sum(len(request["prompt"]) for request in requests), max(own[0] for own in times) - began
    else:
        tokens, seconds = sum(map(len, times)), max(own[-1] for own in times) - began
    return {"tokens": tokens, "seconds": seconds}


def processor_seconds() -> tuple[float, float, float] | None:
    """Return processor seconds since boot, summed over all cores: in total, while active, and used by this process with
    its children."""
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    except OSError:
        return None
    seconds = [int(field) / os.sysconf("SC_CLK_TCK") for field in fields]
    own = os.times()
    idle = seconds[3] + seconds[4]  # idle and waiting for disks
    return sum(seconds), sum(seconds) - idle, own.user + own.system + own.children_user + own.children_system


def others_cpu_share(before: tuple | None, after: tuple | None) -> float | None:
    """Return the fraction of all cores, 0 to 1, that other processes used between two results of
    `processor_seconds`."""
    if before is None or after is None or after[0] <= before[0]:
        return None
    others = (after[1] - before[1]) - (after[2] - before[2])
    return min(1.0, max(0.0, others / (after[0] - before[0])))


def batch_and_length(job: dict) -> tuple[int, int]:
    """Return the number of sequences that run at once in a job, and the maximum number of tokens of one sequence."""
    if job["kind"] == "logits":
        return 1, len(job["prompt"]) + 2
    every = [request for requests in job["repetitions"] for request in requests]
    longest = max(len(request["prompt"]) + request["output_tokens"] for request in every)
    return max(map(len, job["repetitions"])), longest


def peak_bytes() -> int:
    """Return the peak resident bytes of this process: VmHWM on Linux, since `ru_maxrss` includes the parent's peak
    before the fork."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def versions(packages: list[str]) -> dict[str, str | None]:
    """Return the installed version of each distribution; None if it is not installed."""
    found: dict[str, str | None] = {"python": sys.version.split()[0]}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found
