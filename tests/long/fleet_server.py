"""Run `workbench serve MODEL --replicas N` as a process, and see what it has and what it leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

REPLICA = "workbench.cluster.apart.pool_engine"  # the module that a replica's process runs
PATIENCE_SECONDS = 120.0  # for what the fleet is to do by itself


class FleetServer:
    """A server over replicas on this machine, in a process group of its own, until `stop` or the end of the block.

    Attributes:
        url: of the server.
        process: the front's.
    """

    def __init__(self, model: str = "demo", replicas: int = 2, *settings: str):
        command = [sys.executable, "-m", "workbench", "serve", model, "--replicas", str(replicas), "--port", "0"]
        command += ["--json", *(f"--set={each}" for each in settings)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert self.process.stdout is not None
        said = ""
        for line in self.process.stdout:
            said += line
            with suppress(json.JSONDecodeError):
                self.url = json.loads(said)["url"]
                return
        raise RuntimeError(f"{' '.join(command)} ended with {self.process.wait()}")

    def __enter__(self) -> FleetServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> int:
        """End the server as a user would, by SIGTERM; return its exit status."""
        self.process.terminate()
        return self.process.wait()

    def kill(self) -> None:
        """Kill the front's process alone."""
        self.process.kill()
        self.process.wait()

    def processes(self) -> list[psutil.Process]:
        """Return the processes that descend from the front."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def replicas(self) -> list[int]:
        """Return the processes of the replicas, the oldest first."""
        found = []
        for each in self.processes():
            with suppress(psutil.Error):
                if REPLICA in each.cmdline():
                    found.append((each.create_time(), each.pid))
        return [process for _, process in sorted(found)]

    def get(self, path: str) -> bytes:
        """Return what the server answers to a GET."""
        with urllib.request.urlopen(self.url + path) as answer:
            return answer.read()

    def trace(self, call_id: str) -> dict[str, Any]:
        """Return the trace of a call."""
        return json.loads(self.get(f"/v1/traces/{call_id}"))

    def metric(self, name: str) -> float:
        """Return the sum of a metric's samples."""
        lines = [
            line for line in self.get("/metrics").decode().splitlines() if line.startswith((f"{name}{{", f"{name} "))
        ]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


class Traces:
    """Note the processes and files that a fleet has while it runs, to look for them once it has ended.

    Args:
        server: the fleet; `note` may be called again, as its processes change.
    """

    def __init__(self, server: FleetServer):
        self.processes: dict[int, float] = {}  # with the time of their start, since numbers are used again
        self.shared: set[str] = set()  # files of /dev/shm
        self.note(server)

    def note(self, server: FleetServer) -> None:
        """Note the processes that there are now, and the shared memory that they map."""
        for each in server.processes():
            with suppress(psutil.Error, OSError):
                self.processes[each.pid] = each.create_time()
                maps = Path(f"/proc/{each.pid}/maps").read_text()
                names = {line.partition("/dev/shm/")[2] for line in maps.splitlines()}
                self.shared |= {each for each in names if each and not each.endswith(" (deleted)")}

    def left(self) -> list[str]:
        """Return what is still there, in words; nothing, once all is as before the fleet."""
        found = [f"process {number}" for number, began in self.processes.items() if _is_alive(number, began)]
        return found + [f"shared memory {each}" for each in self.shared if os.path.exists(f"/dev/shm/{each}")]


def _is_alive(number: int, began: float) -> bool:
    try:
        process = psutil.Process(number)
        return process.create_time() == began and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill(process: int) -> None:
    """Kill a process that may have ended by itself."""
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def wait_until(true: Any, what: str) -> float:
    """Wait until `true()` and return the seconds that it took (RuntimeError after `PATIENCE_SECONDS`)."""
    began = time.perf_counter()
    while not true():
        if time.perf_counter() - began > PATIENCE_SECONDS:
            raise RuntimeError(f"not within {PATIENCE_SECONDS:.0f} s: {what}")
        time.sleep(0.02)
    return time.perf_counter() - began
