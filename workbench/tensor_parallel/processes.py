"""Start ranks as processes, detect their end, and end them with rank 0; ranks started by torchrun join instead.

A rank runs `python -m MODULE`. It inherits the end of a pipe that rank 0 never writes to: when rank 0 ends, however it
ends, the pipe closes, and the rank exits. Nothing that ranks share has a name: it is gone with the last of them.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import torch

from workbench.errors import WorkbenchError
from workbench.tensor_parallel.distributed import distributed_problem, open_group, open_store
from workbench.tensor_parallel.futex import shared_memory_problem
from workbench.tensor_parallel.ranks import RANK_LOST, NoPeers, Peers, RankFailed, Ranks, Transport
from workbench.tensor_parallel.torchrun import TorchrunRanks, join_torchrun, started_by_torchrun, torchrun_problem

SETTINGS = "WORKBENCH_RANK"  # environment variable with the settings of a rank started by rank 0
LAST_WORDS = 500  # characters of a rank's last output in an error message
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
LOOK_FOR_PARENT_MS = 1000  # between checks that rank 0 is alive, in case another process kept its pipe open


class OtherRanks(Protocol):
    """Rank 0's interface to the processes of the other ranks, 1 to size - 1."""

    ranks: Ranks  # rank 0's own `Ranks`
    threads: int  # number of threads of each rank

    def close(self) -> None:
        """End the processes now."""


def transport_problem(transport: Transport, size: int) -> str | None:
    """Return why `size` ranks on this machine cannot exchange tensors by `transport`; None if they can."""
    if not torch.distributed.is_available():
        return f"transport {transport}: this build of torch has no torch.distributed"
    if transport == "shared_memory" and (problem := shared_memory_problem()):
        return f"{problem}; take transport: gloo"
    if started_by_torchrun():
        return torchrun_problem(transport, size)
    return None if transport == "shared_memory" else distributed_problem(transport, size)


def open_ranks(size: int, timeout: float, module: str, transport: Transport) -> OtherRanks:
    """Start the other ranks, each running `module`, or join those that torchrun started.

    Raises:
        WorkbenchError: if processes cannot exchange numbers by this transport.
    """
    if problem := transport_problem(transport, size):
        raise WorkbenchError(f"parallel.tensor: {problem}")
    if started_by_torchrun():
        return TorchrunRanks(size, timeout, transport)
    return RankProcesses(size, timeout, module, transport)


class RankProcesses:
    """The processes of ranks 1 to `size` - 1, started by rank 0."""

    def __init__(self, size: int, timeout: float, module: str, transport: Transport = "shared_memory"):
        """Start the processes.

        Args:
            size: the number of ranks, rank 0 included.
            timeout: seconds that ranks wait for each other within a task.
            module: the module that each runs: it calls `join_ranks`.
            transport: how ranks exchange numbers.
        """
        reading, writing = os.pipe()
        self.processes: list[subprocess.Popen[bytes]] = []
        self._printed: list[IO[bytes]] = []
        self._last: list[Callable[[], None]] = [lambda: os.close(writing)]
        self._end = weakref.finalize(self, _end, self.processes, self._last)
        self.threads = max(1, torch.get_num_threads() // size)
        peers = ProcessPeers(self.processes, self._printed)
        shared = {"size": size, "pipe": reading, "parent": os.getpid(), "timeout": timeout, "transport": transport}
        try:
            store = open_store(size)
            self._start(shared, module, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}, (reading,))
            self.ranks = ranks = _meet(transport, 0, size, timeout, peers, store)
            self._last.append(ranks.close)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(reading)

    def _start(self, shared: dict[str, Any], module: str, found: dict[str, str], kept: tuple[int, ...]) -> None:
        """Start one process per rank; `found` has the environment that torchrun would set, `kept` the inherited files.
        """
        root = str(Path(__file__).resolve().parents[2])
        for rank in range(1, shared["size"]):
            environment = (
                os.environ
                | found
                | {
                    SETTINGS: json.dumps(shared | {"rank": rank}),
                    "RANK": str(rank),
                    "WORLD_SIZE": str(shared["size"]),
                    "OMP_NUM_THREADS": str(self.threads),
                    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no further processes for compilation
                    "PYTHONPATH": os.pathsep.join([root, *(path for path in sys.path if path)]),
                }
            )
            printed = tempfile.TemporaryFile()  # noqa: SIM115 (closed with this object)
            self._printed.append(printed)
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", module], env=environment, pass_fds=kept,
                    stdin=subprocess.DEVNULL, stdout=printed, stderr=printed,
                )
            )  # fmt: skip

    def close(self) -> None:
        """End the processes now; no resource of theirs remains."""
        self._end()


class _End(NamedTuple):
    """The end of a rank's process: its status as in `Popen.poll`, and its last output."""

    rank: int
    status: int
    words: str

    def is_consequence(self) -> bool:
        """Return whether it ended because another rank did: no signal killed it, and it reports a lost rank."""
        return self.status > 0 and RANK_LOST in self.words


class ProcessPeers:
    """Rank 0's view of the processes of the other ranks. When one of them has ended, the rest are ended too."""

    can_end = True

    def __init__(self, processes: list[subprocess.Popen[bytes]], printed: list[IO[bytes]]):
        self._processes, self._printed, self._failure = processes, printed, ""

    def check(self) -> None:
        if self._failure:  # the first rank's failure; the others were ended because of it
            raise RankFailed(self._failure)
        polled = [(rank, process.poll()) for rank, process in enumerate(self._processes, 1)]
        if ended := [_End(rank, status, self._last_words(rank)) for rank, status in polled if status is not None]:
            _kill(self._processes)
            first = min(ended, key=_End.is_consequence)
            how = f"signal {-first.status}" if first.status < 0 else f"exit status {first.status}"
            reason = f"rank {first.rank} ended ({how}{first.words})"
            self._failure = f"parallel.tensor: {reason}, and the other ranks were ended; load the model again"
            raise RankFailed(self._failure)

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


def _end(processes: list[subprocess.Popen[bytes]], last: list[Callable[[], None]]) -> None:
    _kill(processes)
    for close in reversed(last):
        close()


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Let gloo connect through the loopback interface while ranks of this host meet, unless the environment sets
    another.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    try:
        yield
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]


def join_ranks() -> Ranks:
    """Join the ranks that the environment describes, in a process started by rank 0 or by torchrun.

    Raises:
        WorkbenchError: if the ranks fail to connect, or do not support rank 0's transport.
    """
    if SETTINGS not in os.environ:
        return join_torchrun()
    found = json.loads(os.environ.pop(SETTINGS))
    threading.Thread(target=_exit_with, args=(found["pipe"], found["parent"]), daemon=True).start()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    place = found["rank"], found["size"]
    store, _, _ = next(torch.distributed.rendezvous("env://", *place))
    return _meet(found["transport"], *place, found["timeout"], NoPeers(), store)


def _meet(transport: Transport, rank: int, size: int, timeout: float, peers: Peers, store: Any) -> Ranks:
    """Meet the ranks of this host at a store."""
    store = torch.distributed.PrefixStore("workbench", store)
    try:
        if transport == "shared_memory":
            from workbench.tensor_parallel import shared_memory  # some builds of torch lack torch.distributed

            group = shared_memory.open_group(store, rank, size)
        else:
            with _on_loopback():
                group = open_group(rank, size, timeout, store)
    except WorkbenchError:
        peers.check()
        raise
    return Ranks(group, store, timeout, peers)


def _exit_with(pipe: int, parent: int) -> None:
    """Exit when the other end of a pipe closes, or the process that started this one has ended."""
    closing = select.poll()
    closing.register(pipe, select.POLLHUP)
    while not closing.poll(LOOK_FOR_PARENT_MS) and os.getppid() == parent:
        pass
    os._exit(0)
