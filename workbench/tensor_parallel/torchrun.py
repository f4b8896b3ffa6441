"""Join ranks that torchrun started. They meet at its store, where rank 0 says what carries numbers between them.

torchrun ends all processes where one fails, and none of them is another's child: in shared memory each looks whether
those that it waits for still live.
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

ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # that torchrun sets
DEFAULT_TIMEOUT = 60.0  # seconds, of a rank until rank 0 has posted its settings
TRANSPORT = "transport"  # in the store: what carries numbers
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
        store.set(TRANSPORT, json.dumps(transport))
        self.ranks = _join(transport, 0, size, timeout, store)
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
    return _join(get_said(store, TRANSPORT), rank, size, DEFAULT_TIMEOUT, store)


def _join(transport: Transport, rank: int, size: int, timeout: float, store: Any) -> Ranks:
    if transport != "shared_memory":
        return Ranks(open_group(rank, size, timeout, store), store, timeout, NoPeers())
    from workbench.tensor_parallel import shared_memory  # a build of torch may have no torch.distributed

    group = shared_memory.open_group(store, rank, size)
    return Ranks(group, store, timeout, TorchrunPeers(shared_memory.processes_of(store, rank, size)))


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
    return torch.distributed.PrefixStore("workbench", store)
