"""Ranks exchange numbers through torch.distributed: gloo between CPUs, of several hosts too, NCCL between CUDA devices.

An exchange is an all-gather, and each rank sums what it has in the order of ranks: the same bits as in shared memory,
for any number of ranks. For two ranks it moves as many bytes as an all-reduce. What differs: a task that fails on one
rank, or is interrupted, ends all ranks, since collective calls that only some have made cannot be taken back.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from workbench.errors import WorkbenchError
from workbench.tensor_parallel.ranks import (
    AS_IN_EXCHANGES,
    DIGEST_BYTES,
    LOOK_SECONDS,
    NOTE_BYTES,
    Peers,
    RankFailed,
    Ranks,
)

TASK_BYTES = 2**14  # of a task that is sent with its size; a longer one follows
FOR_EVER = timedelta(days=365)  # limits are those of `_wait`
TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # of the environment that torchrun sets
GRACE_SECONDS = 1.0  # from the end of a rank's connections to that of its process
FAILED = "failed"  # in the store: what the first rank that failed said


def distributed_problem(transport: str, size: int) -> str | None:
    """Return why torch.distributed cannot carry `size` ranks by `transport` (gloo, nccl) here; None where it can."""
    if not torch.distributed.is_available():
        return f"transport {transport}: this build of torch has no torch.distributed"
    if torch.distributed.is_initialized():
        return (
            f"transport {transport}: torch.distributed is in use in this process already; close the other model "
            "(runner.close()), or take transport: shared_memory"
        )
    if transport == "nccl":
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if devices < size or not torch.distributed.is_nccl_available():
            wanted = f"transport nccl: a CUDA device for each of {size} ranks, and here are {devices}"
            return f"{wanted}; take transport: gloo"
    elif not torch.distributed.is_gloo_available():
        return f"transport {transport}: this build of torch has no gloo"
    return None


def started_by_torchrun() -> bool:
    """Return whether this process is one of several that torchrun started."""
    return all(name in os.environ for name in TORCHRUN) and int(os.environ["WORLD_SIZE"]) > 1


def open_store(size: int) -> Any:
    """Open the store at which ranks of this host meet, on its loopback; they need its `port`."""
    return torch.distributed.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)


class DistributedRanks(Ranks):
    """A rank of torch.distributed's default process group, which it makes and, in `close`, ends."""

    def __init__(self, rank: int, size: int, timeout: float, peers: Peers, store: Any = None):
        """Take a place among ranks, as `Ranks` does: at `store`, or where the environment of torchrun says.

        Raises:
            WorkbenchError: where they do not all come within `timeout`, or two minutes if that is more.
        """
        super().__init__(rank, size, timeout, peers)
        self._stuck = False
        kind = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        if store is None:
            store, _, _ = next(torch.distributed.rendezvous("env://", rank, size))
        store.set_timeout(timedelta(seconds=max(timeout, 120)))
        self.store = torch.distributed.PrefixStore("workbench", store)
        try:
            torch.distributed.init_process_group(kind, store=self.store, rank=rank, world_size=size, timeout=FOR_EVER)
        except RuntimeError as error:
            peers.check()
            raise WorkbenchError(f"parallel.tensor: the ranks do not meet: {str(error).splitlines()[0]}") from error

    def close(self) -> None:
        """Leave the group. Ranks that still wait for this one notice."""
        if torch.distributed.is_initialized() and not self._stuck:
            torch.distributed.destroy_process_group()

    def _post(self, raw: bytes) -> None:
        task = torch.zeros(max(TASK_BYTES, len(raw) + 8), dtype=torch.uint8)
        task[:8].view(torch.int64)[0] = len(raw)
        task[8 : 8 + len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        self._begin(self._serial + 1)
        self._wait(torch.distributed.broadcast(task[:TASK_BYTES], 0, async_op=True))
        if len(task) > TASK_BYTES:
            self._wait(torch.distributed.broadcast(task[TASK_BYTES:], 0, async_op=True))

    def _next_task(self) -> bytes:
        task = torch.zeros(TASK_BYTES, dtype=torch.uint8)
        self._wait(torch.distributed.broadcast(task, 0, async_op=True), None)
        size = int(task[:8].view(torch.int64)[0])
        if (more := size + 8 - TASK_BYTES) > 0:
            rest = torch.zeros(more, dtype=torch.uint8)
            self._wait(torch.distributed.broadcast(rest, 0, async_op=True))
            task = torch.cat((task, rest))
        return bytes(task[8 : 8 + size].numpy())

    def _swap(self, chunk: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(chunk) for _ in range(self.size)]
        self._wait(torch.distributed.all_gather(parts, chunk, async_op=True))
        return parts

    def _end(self, timeout: float | None) -> None:
        notes = [torch.zeros(DIGEST_BYTES, dtype=torch.uint8) for _ in range(self.size)]
        self._wait(torch.distributed.gather(notes[0].clone(), notes, 0, async_op=True), timeout)
        for other in range(1, self.size):
            self._compare(other, bytes(notes[other].numpy()))

    def _finish(self) -> None:
        note = torch.tensor(list(self._digest.digest()), dtype=torch.uint8)
        self._wait(torch.distributed.gather(note, None, 0, async_op=True), None)  # rank 0 may be long in its own part

    def _abandon(self, error: BaseException) -> None:
        """End the other ranks: some may wait in a collective call that this one never makes."""
        self.broken = self.broken or f"parallel.tensor: the ranks ended ({error}); load the model again"
        self._peers.end()
        if self._peers.can_end:
            self.close()
        elif not self._stuck:  # a rank may hang, and leaving the group would wait for it for ever
            self._stuck = True
            atexit.register(end_process)

    def _report(self, error: Exception) -> None:
        """Say in the store why this rank ends, and end: rank 0 sees the connection close, and looks there."""
        words = f"rank {self.rank}: {self._words_of(error)}"
        if not isinstance(error, RankFailed):  # what another rank did is for rank 0 to find
            self.store.set(FAILED, words[:NOTE_BYTES])
        raise SystemExit(words)

    def _wait(self, call: Any, timeout: float | None = AS_IN_EXCHANGES) -> None:
        """Wait until a collective call has ended; None is for ever.

        Raises:
            RankFailed: where another rank died, failed or did not answer.
        """
        limit = self.timeout if timeout == AS_IN_EXCHANGES else timeout
        began = time.monotonic()
        while True:
            try:
                call.wait(timedelta(seconds=LOOK_SECONDS if self.rank == 0 else 1.0))
                return
            except RuntimeError:  # the time is over, or the call has failed
                if call.is_completed():
                    if (error := _error_of(call)) is None:  # it ended well, just after its time was over
                        return
                    raise self._lost(error) from None
            self._look()
            if limit is not None and time.monotonic() - began > limit:
                raise self._no_answer(None, limit)

    def _look(self) -> None:
        """Raise on rank 0 where another rank has failed or ended."""
        if self.rank == 0:
            if self.store.check([FAILED]):
                self.broken = f"parallel.tensor: {self.store.get(FAILED).decode()}; load the model again"
                raise RankFailed(self.broken)
            self._peers.check()

    def _lost(self, error: RuntimeError) -> RankFailed:
        """Return what to raise where a call failed, unless a rank said why, or its process shows how it ended."""
        deadline = time.monotonic() + GRACE_SECONDS
        while self.rank == 0 and time.monotonic() < deadline:
            self._look()
            time.sleep(LOOK_SECONDS)
        self.broken = f"parallel.tensor: a rank was lost: {str(error).splitlines()[0]}; load the model again"
        return RankFailed(self.broken)


def _error_of(call: Any) -> RuntimeError | None:
    """Return the error with which a call ended; None where it ended well."""
    try:
        call.wait()
    except RuntimeError as error:
        return error
    return None


def end_process(said: object = "") -> None:
    """End this process as one that failed, without waiting for the threads of torch.distributed, which may wait for a
    rank for ever. torchrun then ends the others."""
    if said:
        print(said, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
