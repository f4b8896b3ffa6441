r"""Compute tasks on all ranks of a model, step by step, and exchange numbers between them.

    rank 0:   post task n --> compute: exchange 1, exchange 2, ... --> compare digests of what was computed
    others:   wait        --> compute: exchange 1, exchange 2, ... --> wait for task n + 1

Rank 0 has the runner; the others compute what it posts, over the same pages. In an exchange every rank gets the numbers
of all; sums are in the order of ranks, so that all have the same bits, whatever carries them (`SharedMemoryRanks`,
`DistributedRanks`).
"""

from __future__ import annotations

import hashlib
import pickle
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from workbench.errors import WorkbenchError

Result = TypeVar("Result")
Transport = Literal["shared_memory", "gloo", "nccl"]  # what carries numbers between ranks
CHUNK_BYTES = 2**20  # of one exchange; more goes in several
NOTE_BYTES = 4096  # of a rank's digest and error
DIGEST_BYTES = 16
LOOK_SECONDS = 0.05  # between looks at whether the others still live
AS_IN_EXCHANGES = -1.0  # a time limit: that of the ranks
STOP = "stop"  # the last task


def rows_per_exchange(columns: int, itemsize: int) -> int:
    """Return how many rows of so many columns an exchange of at most `CHUNK_BYTES` carries; one at least."""
    return max(1, CHUNK_BYTES // (columns * itemsize))


class RankFailed(WorkbenchError):
    """A rank other than this one died, failed, or did not answer in time."""


class TaskAbandoned(Exception):
    """Rank 0 has given up the task that this rank computes."""


class Peers(Protocol):
    """The processes of the other ranks, as a rank that waits sees them."""

    can_end: bool  # whether `end` ends them

    def check(self) -> None:
        """Raise RankFailed where one of them has ended."""

    def end(self) -> None:
        """End all of them."""


class NoPeers:
    """The other ranks, as those but 0 see them: rank 0, or torchrun, looks after all."""

    can_end = False

    def check(self) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing."""


@dataclass
class Traffic:
    """The cost of all exchanges so far: bytes of this rank's own numbers, and seconds, waiting included."""

    exchanges: int = 0
    bytes: int = 0
    seconds: float = 0.0


class Ranks(ABC):
    """This process among the `size` ranks of a model. One thread at a time leads a task; others wait for it."""

    def __init__(self, rank: int, size: int, timeout: float, peers: Peers):
        """Take a place among ranks.

        Args:
            rank: the number of this process.
            size: the number of ranks.
            timeout: seconds to wait for another rank in a task.
            peers: the other processes; looked after while waiting.
        """
        self.rank, self.size, self.timeout, self._peers = rank, size, timeout, peers
        self._serial = 0
        self._running = False
        self._digest = hashlib.blake2b(digest_size=DIGEST_BYTES)  # of the task under way
        self.broken: str | None = None  # why no task can be led any more, once one broke them
        self._leading = threading.Lock()
        self.unused_stores: list[int] = []  # numbers of stores that rank 0 has collected and others still have
        self.traffic = Traffic()

    def lead(
        self, kind: str, content: Any, compute: Callable[[], Result], timeout: float | None = AS_IN_EXCHANGES
    ) -> Result:
        """Post a task to the other ranks, `compute` rank 0's own of it, and wait until all have done theirs.

        Args:
            kind: the task's name.
            content: what others need for it: anything that can be pickled.
            compute: what rank 0 does, with the same exchanges as that of the others.
            timeout: seconds to wait for others at its end, None for ever; as in exchanges unless given.

        Raises:
            RankFailed: where another rank died, failed or did not answer.
        """
        with self._leading:
            if self.broken is not None:
                raise RankFailed(self.broken)
            try:
                self._post(pickle.dumps((kind, content), protocol=5))
                result = compute()
                self._end(timeout)
                return result
            except BaseException as error:
                self._abandon(error)
                raise
            finally:
                self._running = False

    def serve(self, tasks: dict[str, Callable[[Any], None]]) -> None:
        """Do the tasks that rank 0 posts, by their kind, until it posts STOP. One that raises is reported; the next is
        done where the ranks can go on."""
        kind = ""
        while kind != STOP:
            raw = self._next_task()
            self._begin(self._serial + 1)
            try:
                kind, content = pickle.loads(raw)
                if kind != STOP:
                    tasks[kind](content)
            except TaskAbandoned:
                pass
            except Exception as error:
                self._report(error)
            self._running = False
            self._finish()

    def record(self, tensors: Iterable[Tensor]) -> None:
        """Add what this rank is about to compute to its digest, which rank 0 compares at the end of the task."""
        for tensor in tensors:
            self._digest.update(str(tuple(tensor.shape)).encode())
            self._digest.update(tensor.contiguous().cpu().view(-1).view(torch.uint8).numpy().data)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x, which have one shape: in float32 at least, rank by rank, rounded once."""
        exact = torch.promote_types(x.dtype, torch.float32)

        def add(chunks: list[Tensor], out: Tensor) -> None:
            total = chunks[0].to(exact)
            for chunk in chunks[1:]:
                total = total + chunk
            out.copy_(total)

        return self._exchange_in_chunks(x, torch.empty_like(x, memory_format=torch.contiguous_format), add)

    def gather(self, x: Tensor) -> Tensor:
        """Return all ranks' x, which have one shape, on a new first axis: [rank, ...]. Ranks but 0 get their own
        alone, on an axis of one."""
        if self.rank:
            self._exchange_in_chunks(x, None, lambda chunks, out: None)
            return x[None]
        found = torch.empty(self.size, x.numel(), dtype=x.dtype, device=x.device)

        def keep(chunks: list[Tensor], out: Tensor) -> None:
            for rank, chunk in enumerate(chunks):
                out[rank] = chunk

        return self._exchange_in_chunks(x, found, keep).view(self.size, *x.shape)

    def _exchange_in_chunks(
        self, x: Tensor, out: Tensor | None, combine: Callable[[list[Tensor], Tensor], None]
    ) -> Tensor:
        """Exchange x chunk by chunk; `combine` writes all ranks' chunks to their place in `out` [..., value]."""
        if not self._running:
            raise WorkbenchError("parallel.tensor: a model on several ranks computes in the runner's steps alone")
        began, flat = time.perf_counter(), x.contiguous().view(-1)
        target = None if out is None else out.view(-1) if out.numel() == flat.numel() else out
        step = CHUNK_BYTES // x.dtype.itemsize
        for first in range(0, flat.numel(), step):
            chunk = flat[first : first + step]
            chunks = self._swap(chunk)
            if target is not None:
                combine(chunks, target[..., first : first + step])
        self.traffic.exchanges += 1
        self.traffic.bytes += x.nbytes
        self.traffic.seconds += time.perf_counter() - began
        return x if out is None else out

    def _begin(self, serial: int) -> None:
        self._serial, self._running = serial, True
        self._digest = hashlib.blake2b(digest_size=DIGEST_BYTES)

    def _compare(self, other: int, digest: bytes) -> None:
        """Raise where another rank computed something else than this one; for ever after."""
        if digest != self._digest.digest():
            self.broken = f"parallel.tensor: rank {other} computed another step than rank 0; load the model again"
            raise RankFailed(self.broken)

    @staticmethod
    def _words_of(error: Exception) -> str:
        """Return what is said of an error, within its `except` block: how it came about where it is none of ours."""
        return (str(error) if isinstance(error, WorkbenchError) else traceback.format_exc(limit=-2)).strip()

    def _no_answer(self, other: int | None, seconds: float) -> RankFailed:
        """Break the ranks for ever, since one did not answer in time; return what to raise."""
        who = "another rank" if other is None else f"rank {other}"
        self.broken = f"parallel.tensor: {who} did not answer for {seconds:g} s; load the model again"
        return RankFailed(self.broken)

    def break_off(self, reason: str) -> None:
        """Break the ranks for good, on rank 0: none computes any more. Kept is the first reason."""
        self.broken = self.broken or reason
        self._peers.end()

    def close(self) -> None:
        """Leave the ranks: none leads a task any more."""
        self.broken = self.broken or "parallel.tensor: the ranks were closed; load the model again"

    @abstractmethod
    def _post(self, raw: bytes) -> None:
        """Begin a task on rank 0, and hand it to the others."""

    @abstractmethod
    def _next_task(self) -> bytes:
        """Wait for ever for the next task of rank 0."""

    @abstractmethod
    def _swap(self, chunk: Tensor) -> list[Tensor]:
        """Give `chunk` [value] to the other ranks; return the chunks of all, in the order of ranks."""

    @abstractmethod
    def _end(self, timeout: float | None) -> None:
        """Wait on rank 0 until all ranks have done the task, and compare what they computed."""

    @abstractmethod
    def _abandon(self, error: BaseException) -> None:
        """Give up the task on rank 0, for `error`."""

    @abstractmethod
    def _report(self, error: Exception) -> None:
        """Tell rank 0 that the task failed here, within its `except` block."""

    @abstractmethod
    def _finish(self) -> None:
        """Tell rank 0 that this rank is done with the task, and what it computed."""
