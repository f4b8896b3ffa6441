r"""Exchange numbers between the ranks of one host, in shared memory, step by step.

    rank 0:   post task n --> compute: exchange 1, exchange 2, ... --> compare digests of what was computed
    others:   wait        --> compute: exchange 1, exchange 2, ... --> wait for task n + 1

Rank 0 has the runner; the others compute what it posts, over the same pages. In an exchange each rank writes its
numbers to its slot, announces them, waits for those of the others and reads. Two slots a rank, taken in turn, suffice:
a rank that announces exchange i + 1 has read exchange i. Sums are in the order of ranks: all have the same bits.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import pickle
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from workbench.errors import WorkbenchError
from workbench.tensor_parallel.futex import Words

Result = TypeVar("Result")
SLOT_BYTES = 2**20  # of one exchange; more goes in several
TASK_BYTES = 2**26  # of a posted task at most; memory is taken as it is written
NOTE_BYTES = 4096  # of a rank's digest and error
DIGEST_BYTES = 16
EXCHANGES_PER_TASK = 2**16
LOOK_SECONDS = 0.05  # between looks at whether the others still live
STOP = "stop"  # the last task
POSTED, ABANDONED = 0, 1  # words of rank 0: the last task posted; the last one given up


class RankFailed(WorkbenchError):
    """A rank other than this one died, failed, or did not answer in time."""


class TaskAbandoned(Exception):
    """Rank 0 has given up the task that this rank computes."""


class Peers(Protocol):
    """The processes of the other ranks, as a rank that waits sees them."""

    def check(self) -> None:
        """Raise RankFailed where one of them has ended."""

    def end(self) -> None:
        """End all of them."""


@dataclass
class Traffic:
    """The cost of all exchanges so far: bytes of this rank's own numbers, and seconds, waiting included."""

    exchanges: int = 0
    bytes: int = 0
    seconds: float = 0.0


class Ranks:
    """This process among the `size` ranks of a model."""

    def __init__(self, memory: mmap.mmap, rank: int, size: int, timeout: float, peers: Peers):
        """Take a place among ranks.

        Args:
            memory: the map that all share, of `memory_bytes(size)` bytes.
            rank: the number of this process.
            size: the number of ranks.
            timeout: seconds to wait for another rank in a task.
            peers: the other processes; looked after while waiting.
        """
        self.rank, self.size, self.timeout, self._peers = rank, size, timeout, peers
        self._words = Words(memory, 2 + 3 * size)
        with torch.inference_mode(False):  # they are written within that mode and without
            whole = torch.frombuffer(memory, dtype=torch.uint8)
            begin = _page_aligned(Words.bytes_of(2 + 3 * size))
            self._task, begin = whole[begin : begin + TASK_BYTES], begin + TASK_BYTES
            self._notes, begin = whole[begin : begin + size * NOTE_BYTES].view(size, -1), begin + size * NOTE_BYTES
            self._slots = whole[begin:].view(size, 2, SLOT_BYTES)
        self._serial = self._exchange = 0
        self._running = False
        self._digest = hashlib.blake2b(digest_size=DIGEST_BYTES)  # of the task under way
        self._broken: str | None = None
        self.traffic = Traffic()

    @staticmethod
    def memory_bytes(size: int) -> int:
        fixed = _page_aligned(Words.bytes_of(2 + 3 * size)) + TASK_BYTES
        return fixed + size * (NOTE_BYTES + 2 * SLOT_BYTES)

    def lead(self, kind: str, content: Any, work: Callable[[], Result], timeout: float | None = -1.0) -> Result:
        """Post a task to the other ranks, do rank 0's `work` of it, and wait until all have done theirs.

        Args:
            kind: the task's name.
            content: what others need for it: anything that can be pickled.
            work: rank 0's part, with the same exchanges as that of the others.
            timeout: seconds to wait for others at its end, None for ever; as in exchanges unless given.

        Raises:
            RankFailed: where another rank died, failed or did not answer.
        """
        if self._broken is not None:
            raise RankFailed(self._broken)
        raw = pickle.dumps((kind, content), protocol=5)
        if len(raw) + 8 > TASK_BYTES:
            raise WorkbenchError(f"parallel.tensor: a step of {len(raw)} bytes; {TASK_BYTES} is the most")
        self._task[8 : 8 + len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        self._task[:8].view(torch.int64)[0] = len(raw)
        self._begin(self._serial + 1)
        self._words.publish(POSTED, self._serial)
        try:
            result = work()
            self._end(timeout)
            return result
        except BaseException as error:
            self._abandon(error)
            raise
        finally:
            self._running = False

    def _end(self, timeout: float | None) -> None:
        """Wait until all ranks have done the task, and compare what they computed."""
        for other in range(1, self.size):
            self._wait(self._ended(other), self._serial, timeout)
            self._look()
            if bytes(self._notes[other, :DIGEST_BYTES].numpy()) != self._digest.digest():
                self._broken = f"parallel.tensor: rank {other} computed another step than rank 0; load the model again"
                raise RankFailed(self._broken)

    def _abandon(self, error: BaseException) -> None:
        """Let all ranks give up the task, so that the next begins with all of them idle."""
        self._words.publish(ABANDONED, self._serial)
        if not isinstance(error, Exception):  # an interrupt: others may be long in what they do
            self._broken = self._broken or "parallel.tensor: the ranks were interrupted; load the model again"
        if self._broken is not None:
            self._peers.end()
            return
        try:
            for other in range(1, self.size):
                self._wait(self._ended(other), self._serial, looks=False)
        except RankFailed as failed:
            self._broken = self._broken or str(failed)
            self._peers.end()
            if not isinstance(error, RankFailed):
                raise

    def serve(self, tasks: dict[str, Callable[[Any], None]]) -> None:
        """Do the tasks that rank 0 posts, by their kind, until it posts STOP. One that raises is reported, and the next
        done."""
        kind = ""
        while kind != STOP:
            self._wait(POSTED, self._serial + 1, None, looks=False)
            self._begin(self._serial + 1)
            try:
                size = int(self._task[:8].view(torch.int64)[0])
                kind, content = pickle.loads(bytes(self._task[8 : 8 + size].numpy()))
                if kind != STOP:
                    tasks[kind](content)
            except TaskAbandoned:
                pass
            except Exception as error:
                self._report(str(error) if isinstance(error, WorkbenchError) else traceback.format_exc(limit=-2))
            self._running = False
            self._notes[self.rank, :DIGEST_BYTES] = torch.tensor(list(self._digest.digest()), dtype=torch.uint8)
            self._words.publish(self._ended(self.rank), self._serial)

    def _report(self, error: str) -> None:
        raw = error.encode()[: NOTE_BYTES - DIGEST_BYTES - 1]
        note = self._notes[self.rank, DIGEST_BYTES:]
        note.zero_()
        note[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        self._words.publish(self._failed(self.rank), self._serial)

    def _begin(self, serial: int) -> None:
        self._serial, self._exchange, self._running = serial, 0, True
        self._digest = hashlib.blake2b(digest_size=DIGEST_BYTES)

    def record(self, parts: Iterable[Tensor]) -> None:
        """Add what this rank is about to compute to its digest, which rank 0 compares at the end of the task."""
        for part in parts:
            self._digest.update(str(tuple(part.shape)).encode())
            self._digest.update(part.contiguous().view(-1).view(torch.uint8).numpy().data)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x, which have one shape: in float32 at least, rank by rank, rounded once."""
        exact = torch.promote_types(x.dtype, torch.float32)

        def add(parts: list[Tensor], out: Tensor) -> None:
            total = parts[0].to(exact)
            for part in parts[1:]:
                total = total + part
            out.copy_(total)

        return self._exchange_in_chunks(x, torch.empty_like(x, memory_format=torch.contiguous_format), add)

    def gather(self, x: Tensor) -> Tensor:
        """Return all ranks' x, which have one shape, on a new first axis: [rank, ...]. Ranks but 0 get their own
        alone, on an axis of one."""
        if self.rank:
            self._exchange_in_chunks(x, None, lambda parts, out: None)
            return x[None]
        found = torch.empty(self.size, x.numel(), dtype=x.dtype)

        def keep(parts: list[Tensor], out: Tensor) -> None:
            for rank, part in enumerate(parts):
                out[rank] = part

        return self._exchange_in_chunks(x, found, keep).view(self.size, *x.shape)

    def _exchange_in_chunks(
        self, x: Tensor, out: Tensor | None, read: Callable[[list[Tensor], Tensor], None]
    ) -> Tensor:
        """Exchange x chunk by chunk; `read` takes all ranks' chunks and the place in `out` [..., value] for them."""
        if not self._running:
            raise WorkbenchError("parallel.tensor: a model on several ranks computes in the runner's steps alone")
        began, flat = time.perf_counter(), x.contiguous().view(-1)
        target = None if out is None else out.view(-1) if out.numel() == flat.numel() else out
        step = SLOT_BYTES // x.dtype.itemsize
        for first in range(0, flat.numel(), step):
            chunk = flat[first : first + step]
            parts = self._swap(chunk)
            if target is not None:
                read(parts, target[..., first : first + step])
        self.traffic.exchanges += 1
        self.traffic.bytes += x.nbytes
        self.traffic.seconds += time.perf_counter() - began
        return x if out is None else out

    def _swap(self, chunk: Tensor) -> list[Tensor]:
        """Return the chunks of all ranks, as views of their slots."""
        slots, serial = self._slots[:, self._exchange % 2, : chunk.nbytes].view(chunk.dtype), self._serial
        self._exchange += 1
        if self._exchange >= EXCHANGES_PER_TASK:
            raise WorkbenchError(f"parallel.tensor: more than {EXCHANGES_PER_TASK} exchanges in a step")
        slots[self.rank] = chunk
        reached = serial * EXCHANGES_PER_TASK + self._exchange
        self._words.publish(self._arrived(self.rank), reached)
        for other in range(self.size):
            if other != self.rank:
                self._wait(self._arrived(other), reached)
        return list(slots)

    def _wait(self, word: int, value: int, timeout: float | None = -1.0, looks: bool = True) -> None:
        """Wait until a word has reached `value`; `timeout` of None is for ever, -1 as long as ranks wait.

        Raises:
            RankFailed: where a rank died, failed (if it `looks`) or did not answer.
            TaskAbandoned: where rank 0 gave up the task.
        """
        if self._words.spin(word, value):
            return
        limit = self.timeout if timeout == -1.0 else timeout
        began = time.monotonic()
        while not self._words.reached(word, value):
            self._words.sleep(word, value, LOOK_SECONDS if limit is not None or looks else 1.0)
            if self._words.reached(word, value):
                return
            if looks:
                self._look()
            self._peers.check()
            if limit is not None and time.monotonic() - began > limit:
                other = (word - 2) // 3
                self._broken = f"parallel.tensor: rank {other} did not answer for {limit:g} s; load the model again"
                raise RankFailed(self._broken)

    def _look(self) -> None:
        """Raise where another rank has failed in this task, or rank 0 has given it up."""
        if self.rank:
            if self._words[ABANDONED] == self._serial % 2**32:
                raise TaskAbandoned
            return
        for other in range(1, self.size):
            if self._words[self._failed(other)] == self._serial % 2**32:
                note = bytes(self._notes[other, DIGEST_BYTES:].numpy()).rstrip(b"\0").decode(errors="replace")
                raise RankFailed(f"parallel.tensor: rank {other}: {note.strip()}")

    def _arrived(self, rank: int) -> int:
        return 2 + 3 * rank

    def _ended(self, rank: int) -> int:
        return 3 + 3 * rank

    def _failed(self, rank: int) -> int:
        return 4 + 3 * rank


def _page_aligned(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def map_memory(descriptor: int, size: int) -> mmap.mmap:
    """Map the memory that ranks share."""
    return mmap.mmap(descriptor, Ranks.memory_bytes(size))


def create_memory(size: int) -> int:
    """Create memory for so many ranks; return its file descriptor. It has no name: it ends with the last process."""
    descriptor = os.memfd_create("workbench-ranks", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, Ranks.memory_bytes(size))
    return descriptor
