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
POLL_SECONDS = 5e-5  # between looks at whether a call of NCCL has ended
MEETING_SECONDS = 120.0  # at least, for all ranks to come
GRACE_SECONDS = 1.0  # from the end of a rank's connections to that of its process
RANK_LOST = "a rank was lost"  # what a rank says before it ends because another has
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


def open_store(size: int) -> Any:
    """Open the store at which ranks of this host meet, on its loopback; they need its `port`."""
    return torch.distributed.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)


def not_met(error: Exception) -> WorkbenchError:
    """Return what to raise where ranks wait for each other in vain while they start."""
    return WorkbenchError(f"parallel.tensor: the ranks do not meet: {str(error).splitlines()[0]}")


class DistributedRanks(Ranks):
    """A rank of torch.distributed's default process group, which it makes and, in `close`, ends."""

    def __init__(self, rank: int, size: int, timeout: float, peers: Peers, store: Any):
        """Take a place among ranks, as `Ranks` does; they meet at `store`.

        Raises:
            WorkbenchError: where they do not all come within `MEETING_SECONDS`, or `timeout` if that is more.
        """
        super().__init__(rank, size, timeout, peers)
        self._stuck = False
        kind = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        store.set_timeout(timedelta(seconds=max(timeout, MEETING_SECONDS)))
        self.store = torch.distributed.PrefixStore("workbench", store)
        try:
            torch.distributed.init_process_group(kind, store=self.store, rank=rank, world_size=size, timeout=FOR_EVER)
        except RuntimeError as error:
            peers.check()
            raise not_met(error) from error

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
        chunks = [torch.empty_like(chunk) for _ in range(self.size)]
        self._wait(torch.distributed.all_gather(chunks, chunk, async_op=True), on_cuda=chunk.is_cuda)
        return chunks

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

    def _wait(self, call: Any, timeout: float | None = AS_IN_EXCHANGES, on_cuda: bool = False) -> None:
        """Wait until a collective call has ended, of NCCL where it is `on_cuda`; None is for ever.

        Raises:
            RankFailed: where another rank died, failed or did not answer.
        """
        limit = self.timeout if timeout == AS_IN_EXCHANGES else timeout
        began = time.monotonic()
        while not (_poll if on_cuda else _wait_for)(call, LOOK_SECONDS if self.rank == 0 else 1.0):
            self._look()
            if limit is not None and time.monotonic() - began > limit:
                raise self._no_answer(None, limit)
        if (error := _error_of(call)) is not None:
            raise self._lost(error)

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
        self.broken = f"parallel.tensor: {RANK_LOST}: {str(error).splitlines()[0]}; load the model again"
        return RankFailed(self.broken)


def _wait_for(call: Any, seconds: float) -> bool:
    """Wait at most so long for a call of gloo; return whether it has ended, well or not."""
    try:
        call.wait(timedelta(seconds=seconds))
    except RuntimeError:  # the time is over, or the call has failed
        return call.is_completed()
    return True


def _poll(call: Any, seconds: float) -> bool:
    """Look at most so long whether a call of NCCL has ended, well or not; return whether it has.

    Its `wait` with a limit would not do: where the limit is over it makes the call itself fail, and the communicator
    with it; without one it returns at once, and the next copy to the CPU waits for ever
    (`WorkNCCL::wait` and `isCompleted` in torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp).
    """
    deadline = time.monotonic() + seconds
    while not call.is_completed():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def _error_of(call: Any) -> RuntimeError | None:
    """Return the error with which a call ended; None where it ended well. What follows on this stream comes after it:
    NCCL looks for errors only where `wait` has a limit, which is never over for a call that has ended."""
    try:
        call.wait(FOR_EVER)
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
