"""Start ranks as processes, notice their end, and end them with rank 0.

A rank runs `python -m MODULE`. It inherits the shared memory and the end of a pipe that rank 0 never writes to: when
rank 0 ends, however it ends, the pipe closes, and the rank exits.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from pathlib import Path
from typing import IO

import torch

from workbench.errors import WorkbenchError
from workbench.tensor_parallel.futex import shared_memory_problem
from workbench.tensor_parallel.ranks import RankFailed, Ranks, create_memory, map_memory

SETTINGS = "WORKBENCH_RANK"  # of the environment: rank, size, memory, pipe, timeout
LAST_WORDS = 500  # characters of what a rank printed before it ended


class RankProcesses:
    """The processes of ranks 1 to `size` - 1, started by rank 0; `ranks` is rank 0's place among them."""

    def __init__(self, size: int, timeout: float, module: str):
        """Start the processes.

        Args:
            size: the number of ranks, rank 0 included.
            timeout: seconds that ranks wait for each other within a task.
            module: the module that each runs: it calls `join_ranks`.

        Raises:
            WorkbenchError: where processes cannot share memory.
        """
        if problem := shared_memory_problem():
            raise WorkbenchError(f"parallel.tensor: {problem}; leave it out")
        memory, (reading, self._writing) = create_memory(size), os.pipe()
        self.processes: list[subprocess.Popen[bytes]] = []
        self._printed: list[IO[bytes]] = []
        self._end = weakref.finalize(self, _end, self.processes, self._writing)
        self.threads = max(1, torch.get_num_threads() // size)
        try:
            for rank in range(1, size):
                self._start(rank, size, timeout, module, memory, reading)
            self.ranks = Ranks(map_memory(memory, size), 0, size, timeout, ProcessPeers(self.processes, self._printed))
        except BaseException:
            self.close()
            raise
        finally:
            os.close(memory)
            os.close(reading)

    def _start(self, rank: int, size: int, timeout: float, module: str, memory: int, pipe: int) -> None:
        root = str(Path(__file__).resolve().parents[2])
        environment = os.environ | {
            SETTINGS: f"{rank} {size} {memory} {pipe} {timeout!r}",
            "OMP_NUM_THREADS": str(self.threads),
            "PYTHONPATH": os.pathsep.join([root, *(path for path in sys.path if path)]),
        }
        printed = tempfile.TemporaryFile()  # noqa: SIM115 (closed with this object)
        self._printed.append(printed)
        self.processes.append(
            subprocess.Popen(
                [sys.executable, "-m", module], env=environment, pass_fds=(memory, pipe),
                stdin=subprocess.DEVNULL, stdout=printed, stderr=printed,
            )
        )  # fmt: skip

    def close(self) -> None:
        """End the processes now. Nothing of theirs outlives them."""
        self._end()


class ProcessPeers:
    """The other ranks, as rank 0 sees them; the first that has ended ends the others."""

    def __init__(self, processes: list[subprocess.Popen[bytes]], printed: list[IO[bytes]]):
        self._processes, self._printed, self._failure = processes, printed, ""

    def check(self) -> None:
        if self._failure:  # of the first: the others were ended for it
            raise RankFailed(self._failure)
        for rank, process in enumerate(self._processes, 1):
            if (status := process.poll()) is None:
                continue
            _kill(self._processes)
            how = f"signal {-status}" if status < 0 else f"exit status {status}"
            said = self._last_words(rank)
            died = f"parallel.tensor: rank {rank} ended ({how}{said}), and so were the others; load the model again"
            self._failure = died
            raise RankFailed(died)

    def end(self) -> None:
        _kill(self._processes)

    def _last_words(self, rank: int) -> str:
        stream = self._printed[rank - 1]
        stream.seek(0)
        words = " ".join(stream.read().decode(errors="replace").split())
        return f": {words[-LAST_WORDS:]}" if words else ""


def _kill(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
    for process in processes:
        process.wait()


def _end(processes: list[subprocess.Popen[bytes]], pipe: int) -> None:
    _kill(processes)
    os.close(pipe)


class NoPeers:
    """The other ranks, as those but 0 see them: rank 0 looks after all."""

    def check(self) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing."""


def join_ranks() -> Ranks:
    """Take this process's place among the ranks, as the environment of one started by `RankProcesses` says."""
    rank, size, memory, pipe, timeout = os.environ.pop(SETTINGS).split()
    threading.Thread(target=_exit_with, args=(int(pipe),), daemon=True).start()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    mapped = map_memory(int(memory), int(size))
    os.close(int(memory))
    return Ranks(mapped, int(rank), int(size), float(timeout), NoPeers())


def _exit_with(pipe: int) -> None:
    """Exit when the other end of a pipe closes."""
    while os.read(pipe, 1):
        time.sleep(0)
    os._exit(0)
