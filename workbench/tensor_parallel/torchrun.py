"""Join ranks that torchrun started. They meet at its store, where rank 0 says what carries numbers between them.

    rank 0:  create memory, say where it lies --> wait for all answers --> lead tasks
    others:  wait for what rank 0 says --> map the memory, or say why not --> serve

In shared memory all are processes of one host: rank 0's memory has no name, and others open it by its descriptor, as
`/proc/PID/fd/NUMBER`. With gloo and NCCL they make torch.distributed's group instead. torchrun ends all processes where
one fails, and none of them is another's child: in shared memory each looks whether those that it waits for still live.
"""

from __future__ import annotations

import atexit
import json
import os
import platform
import select
import weakref
from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from workbench.errors import WorkbenchError
from workbench.tensor_parallel.distributed import (
    MEETING_SECONDS,
    DistributedRanks,
    distributed_problem,
    end_process,
    not_met,
)
from workbench.tensor_parallel.ranks import STOP, NoPeers, RankFailed, Ranks, Transport
from workbench.tensor_parallel.shared_memory import SharedMemoryRanks, create_memory, map_memory

ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # that torchrun sets
DEFAULT_TIMEOUT = 60.0  # seconds, of a rank until rank 0 has posted its settings
OFFER = "workbench/offer"  # in the store: what carries numbers, and where rank 0's memory lies
ANSWER = "workbench/answer/{}"  # of a rank: its process, or why it cannot map the memory
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
REMEDY = "take transport: gloo"


def started_by_torchrun() -> bool:
    """Return whether this process is one of several that torchrun started."""
    return all(name in os.environ for name in ENVIRONMENT) and int(os.environ["WORLD_SIZE"]) > 1


def torchrun_problem(transport: Transport, size: int) -> str | None:
    """Return why the processes that torchrun started cannot be `size` ranks with `transport`; None where they can."""
    world = int(os.environ["WORLD_SIZE"])
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if size != world:
        return f"torchrun started {world} processes, and parallel.tensor is {size}: give both the same number"
    if TorchrunRanks.taken:
        return "the processes that torchrun started have served a model already: load one in each process"
    if transport != "shared_memory":
        return distributed_problem(transport, local)
    if local != world:
        return f"transport shared_memory: torchrun started {local} of {world} processes on this host; {REMEDY}"
    return None


class TorchrunRanks:
    """The processes beside this one that torchrun started, as rank 0 holds them; torchrun looks after them."""

    taken = False  # whether the others have joined once: they serve one model, and end with it

    def __init__(self, size: int, timeout: float, transport: Transport):
        """Take rank 0's place among them.

        Raises:
            WorkbenchError: where they do not all come, or cannot map one memory.
        """
        self.threads = torch.get_num_threads()  # torchrun has set it for each process
        TorchrunRanks.taken = True
        store = _meet(0, size, timeout)
        if transport == "shared_memory":
            self.ranks: Ranks = offer_memory(store, size, timeout)
        else:
            store.set(OFFER, json.dumps({"transport": transport}))
            self.ranks = DistributedRanks(0, size, timeout, NoPeers(), store)
        self._end = weakref.finalize(self, _stop, self.ranks)

    def close(self) -> None:
        """Let the other processes end."""
        self._end()


def join_torchrun() -> Ranks:
    """Take this process's place among those that torchrun started, as a rank but 0.

    Raises:
        WorkbenchError: where they do not meet, or this one cannot map rank 0's memory.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = _meet(rank, size, DEFAULT_TIMEOUT)
    offer = _get(store, OFFER)
    if offer["transport"] == "shared_memory":
        return map_offered(store, offer, rank, size)
    return DistributedRanks(rank, size, DEFAULT_TIMEOUT, NoPeers(), store)


def offer_memory(store: Any, size: int, timeout: float) -> SharedMemoryRanks:
    """Create rank 0's memory, and wait until all other ranks have mapped it.

    Raises:
        WorkbenchError: where one does not come, or says why it cannot.
    """
    memory = create_memory(size)
    try:
        found, pid = os.fstat(memory), os.getpid()
        store.set(OFFER, json.dumps({
            "transport": "shared_memory", "host": _host(), "name": platform.node(), "pid": pid,
            "path": f"/proc/{pid}/fd/{memory}", "file": [found.st_dev, found.st_ino],
        }))  # fmt: skip
        pids = {}
        for rank in range(1, size):
            answer = _get(store, ANSWER.format(rank))
            if "problem" in answer:
                raise WorkbenchError(f"parallel.tensor: rank {rank}: {answer['problem']}")
            pids[rank] = answer["pid"]
        return SharedMemoryRanks(map_memory(memory, size), 0, size, timeout, TorchrunPeers(pids))
    finally:
        os.close(memory)


def map_offered(store: Any, offer: Mapping[str, Any], rank: int, size: int) -> SharedMemoryRanks:
    """Map the memory that rank 0 offers, and answer it.

    Raises:
        WorkbenchError: where this process is on another host, or may not open the memory, which it reports to rank 0.
    """
    try:
        memory = _open_offered(offer)
    except WorkbenchError as error:
        store.set(ANSWER.format(rank), json.dumps({"problem": str(error)}))
        raise WorkbenchError(f"parallel.tensor: rank {rank}: {error}") from None
    mapped = map_memory(memory, size)
    os.close(memory)
    ranks = SharedMemoryRanks(mapped, rank, size, DEFAULT_TIMEOUT, TorchrunPeers({0: offer["pid"]}))
    store.set(ANSWER.format(rank), json.dumps({"pid": os.getpid()}))
    return ranks


def _open_offered(offer: Mapping[str, Any]) -> int:
    """Open rank 0's memory; return its descriptor."""
    if offer["host"] != _host():
        raise WorkbenchError(
            f"transport shared_memory: it runs on {platform.node()} and rank 0 on {offer['name']}; {REMEDY}"
        )
    try:
        memory = os.open(offer["path"], os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise WorkbenchError(
            f"transport shared_memory: it may not open rank 0's memory at {offer['path']} ({error.strerror}): all must "
            f"be processes of one user and one container; {REMEDY}"
        ) from None
    found = os.fstat(memory)
    if [found.st_dev, found.st_ino] != offer["file"]:  # the number of another process, in another container
        os.close(memory)
        raise WorkbenchError(f"transport shared_memory: it sees other processes than rank 0 does; {REMEDY}")
    return memory


class TorchrunPeers:
    """Other ranks on this host that are no children of this one: each is looked at through a descriptor of it."""

    can_end = False

    def __init__(self, pids: Mapping[int, int]):
        """Open a descriptor of each rank's process, which lives.

        Raises:
            WorkbenchError: where there is none, or this system gives none.
        """
        self._ranks, self._ended, self._ends_as_failed = dict[int, int](), select.poll(), False
        weakref.finalize(self, _close, self._ranks)
        for rank, pid in pids.items():
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                raise RankFailed(_ended_words(rank)) from None
            except OSError as error:
                raise WorkbenchError(
                    f"parallel.tensor: rank {rank}'s process cannot be looked after (pidfd_open: {error.strerror}); "
                    f"{REMEDY}"
                ) from None
            self._ranks[descriptor] = rank
            self._ended.register(descriptor, select.POLLIN)

    def check(self) -> None:
        """Raise RankFailed where one of them has ended."""
        for descriptor, _ in self._ended.poll(0):
            raise RankFailed(_ended_words(self._ranks[descriptor]))

    def end(self) -> None:
        """Let this process end as failed, once it has said what became of its requests: torchrun then ends all."""
        if not self._ends_as_failed:
            self._ends_as_failed = True
            atexit.register(end_process)


def _ended_words(rank: int) -> str:
    return f"parallel.tensor: rank {rank} ended, and torchrun says how; load the model again"


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _stop(ranks: Ranks) -> None:
    try:
        ranks.lead(STOP, None, lambda: None)
    except RankFailed:  # they have ended
        pass
    finally:
        ranks.close()


def _meet(rank: int, size: int, timeout: float) -> Any:
    """Return the store at which all processes of torchrun meet."""
    try:
        store, _, _ = next(torch.distributed.rendezvous("env://", rank, size))
    except RuntimeError as error:
        raise not_met(error) from error
    store.set_timeout(timedelta(seconds=max(timeout, MEETING_SECONDS)))
    return store


def _get(store: Any, name: str) -> dict[str, Any]:
    """Return what a rank says in the store, once it does."""
    try:
        return json.loads(store.get(name))
    except RuntimeError as error:
        raise not_met(error) from error


def _host() -> str:
    """Return what tells this host from others while it runs: names of hosts may be equal."""
    return BOOT_ID.read_text().strip()
