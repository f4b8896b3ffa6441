"""Join ranks that torchrun started. They connect through its store, where rank 0 publishes the transport.

torchrun ends all processes if one fails. They are not each other's children, so in shared memory each rank checks that
the ranks it waits for are alive.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import weakref
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch

from workbench.errors import WorkbenchError
from workbench.tensor_parallel.distributed import (
    MEETING_SECONDS,
    distributed_problem,
    end_process,
    get_said,
    not_met,
    open_group,
)
from workbench.tensor_parallel.ranks import STOP, NoPeers, RankFailed, Ranks, Transport

ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # set by torchrun
DEFAULT_TIMEOUT = 60.0  # seconds; limit of a rank until rank 0 has sent its settings
TRANSPORT = "transport"  # store key of the transport
REMEDY = "take transport: gloo"


def started_by_torchrun() -> bool:
    """Return whether this process is one of several that torchrun started."""
    return all(name in os.environ for name in ENVIRONMENT) and int(os.environ["WORLD_SIZE"]) > 1


def torchrun_problem(transport: Transport, size: int) -> str | None:
    """Return why the processes that torchrun started cannot be `size` ranks with `transport`; None if they can."""
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
    """Rank 0's interface to the other ranks, which torchrun started and monitors."""

    taken = False  # whether the others have joined: they serve one model, and end with it

    def __init__(self, size: int, timeout: float, transport: Transport):
        """Join them as rank 0.

        Raises:
            WorkbenchError: if a rank does not join, or the ranks cannot map one memory.
        """
        self.threads = torch.get_num_threads()  # torchrun has set it for each process
        TorchrunRanks.taken = True
        store = _meet(0, size, timeout)
        store.set(TRANSPORT, json.dumps(transport))
        self.ranks = _join(transport, 0, size, timeout, store)
        self._end = weakref.finalize(self, _stop, self.ranks)

    def close(self) -> None:
        """Tell the other ranks to end."""
        self._end()


def join_torchrun() -> Ranks:
    """Join the processes started by torchrun as a rank other than 0.

    Raises:
        WorkbenchError: if the ranks do not meet, or this one cannot map rank 0's memory.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = _meet(rank, size, DEFAULT_TIMEOUT)
    return _join(get_said(store, TRANSPORT), rank, size, DEFAULT_TIMEOUT, store)


def _join(transport: Transport, rank: int, size: int, timeout: float, store: Any) -> Ranks:
    if transport != "shared_memory":
        return Ranks(open_group(rank, size, timeout, store), store, timeout, NoPeers())
    from workbench.tensor_parallel import shared_memory  # some builds of torch lack torch.distributed

    group = shared_memory.open_group(store, rank, size)
    return Ranks(group, store, timeout, TorchrunPeers(shared_memory.processes_of(store, rank, size)))


class TorchrunPeers:
    """The other ranks on this host when torchrun started them: they are no child processes, so each is monitored
    through a pidfd.
    """

    can_end = False

    def __init__(self, pids: Mapping[int, int]):
        """Open a descriptor (pidfd) of each rank's process.

        Raises:
            RankFailed: if a process has ended.
            WorkbenchError: if the system has no pidfds.
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
        """Raise RankFailed if the process of another rank has ended."""
        for descriptor, _ in self._ended.poll(0):
            raise RankFailed(_ended_words(self._ranks[descriptor]))

    def end(self) -> None:
        """End this process as failed, after it has reported its requests; torchrun then ends all."""
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
    return torch.distributed.PrefixStore("workbench", store)
