r"""Ranks of one host exchange numbers in shared memory.

In an exchange each rank writes its numbers to its slot, announces them, waits for those of the others and reads. Two
slots a rank, taken in turn, suffice: a rank that announces exchange i + 1 has read exchange i. A task that fails on one
rank is given up by all, and the next is computed.
"""

from __future__ import annotations

import mmap
import os
import time

import torch
from torch import Tensor

from workbench.errors import WorkbenchError
from workbench.tensor_parallel.futex import Words
from workbench.tensor_parallel.ranks import (
    AS_IN_EXCHANGES,
    CHUNK_BYTES,
    DIGEST_BYTES,
    LOOK_SECONDS,
    NOTE_BYTES,
    Peers,
    RankFailed,
    Ranks,
    TaskAbandoned,
)

TASK_BYTES = 2**26  # of a posted task at most; memory is taken as it is written
EXCHANGES_PER_TASK = 2**16
POSTED, ABANDONED = 0, 1  # words of rank 0: the last task posted; the last one given up


class SharedMemoryRanks(Ranks):
    """A rank whose numbers lie in a map that all ranks share."""

    def __init__(self, memory: mmap.mmap, rank: int, size: int, timeout: float, peers: Peers):
        """Take a place among ranks, as `Ranks` does; `memory` has `memory_bytes(size)` bytes."""
        super().__init__(rank, size, timeout, peers)
        self._exchange = 0
        self._words = Words(memory, 2 + 3 * size)
        with torch.inference_mode(False):  # they are written within that mode and without
            mapped = torch.frombuffer(memory, dtype=torch.uint8)
            begin = _page_aligned(Words.bytes_of(2 + 3 * size))
            self._task, begin = mapped[begin : begin + TASK_BYTES], begin + TASK_BYTES
            self._notes, begin = mapped[begin : begin + size * NOTE_BYTES].view(size, -1), begin + size * NOTE_BYTES
            self._slots = mapped[begin:].view(size, 2, CHUNK_BYTES)

    @staticmethod
    def memory_bytes(size: int) -> int:
        fixed = _page_aligned(Words.bytes_of(2 + 3 * size)) + TASK_BYTES
        return fixed + size * (NOTE_BYTES + 2 * CHUNK_BYTES)

    def _post(self, raw: bytes) -> None:
        if len(raw) + 8 > TASK_BYTES:
            raise WorkbenchError(f"parallel.tensor: a step of {len(raw)} bytes; {TASK_BYTES} is the most")
        self._task[8 : 8 + len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        self._task[:8].view(torch.int64)[0] = len(raw)
        self._begin(self._serial + 1)
        self._words.publish(POSTED, self._serial)

    def _next_task(self) -> bytes:
        self._wait(POSTED, self._serial + 1, None, looks=False)
        size = int(self._task[:8].view(torch.int64)[0])
        return bytes(self._task[8 : 8 + size].numpy())

    def _begin(self, serial: int) -> None:
        super()._begin(serial)
        self._exchange = 0
        # Tasks without exchanges count too: a word may not fall 2**31 behind what is waited for.
        self._words.store(self._arrived(self.rank), serial * EXCHANGES_PER_TASK)

    def _end(self, timeout: float | None) -> None:
        for other in range(1, self.size):
            self._wait(self._ended(other), self._serial, timeout)
            self._look()
            self._compare(other, bytes(self._notes[other, :DIGEST_BYTES].numpy()))

    def _abandon(self, error: BaseException) -> None:
        """Let all ranks give up the task, so that the next begins with all of them idle."""
        self._words.publish(ABANDONED, self._serial)
        if not isinstance(error, Exception):  # an interrupt: others may be long in what they do
            self.broken = self.broken or "parallel.tensor: the ranks were interrupted; load the model again"
        if self.broken is not None:
            self._peers.end()
            return
        try:
            for other in range(1, self.size):
                self._wait(self._ended(other), self._serial, looks=False)
        except RankFailed as failed:
            self.broken = self.broken or str(failed)
            self._peers.end()
            if not isinstance(error, RankFailed):
                raise

    def _finish(self) -> None:
        self._notes[self.rank, :DIGEST_BYTES] = torch.tensor(list(self._digest.digest()), dtype=torch.uint8)
        self._words.publish(self._ended(self.rank), self._serial)

    def _report(self, error: Exception) -> None:
        raw = self._words_of(error).encode()[: NOTE_BYTES - DIGEST_BYTES - 1]
        note = self._notes[self.rank, DIGEST_BYTES:]
        note.zero_()
        note[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        self._words.publish(self._failed(self.rank), self._serial)

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

    def _wait(self, word: int, value: int, timeout: float | None = AS_IN_EXCHANGES, looks: bool = True) -> None:
        """Wait until a word has reached `value`; `timeout` of None is for ever.

        Raises:
            RankFailed: where a rank died, failed (if it `looks`) or did not answer.
            TaskAbandoned: where rank 0 gave up the task.
        """
        if self._words.spin(word, value):
            return
        limit = self.timeout if timeout == AS_IN_EXCHANGES else timeout
        began = time.monotonic()
        while not self._words.reached(word, value):
            self._words.sleep(word, value, LOOK_SECONDS if limit is not None or looks else 1.0)
            if self._words.reached(word, value):
                return
            if looks:
                self._look()
            try:
                self._peers.check()
            except RankFailed:
                if self._words.reached(word, value):  # it announced this, and ended well
                    return
                raise
            if limit is not None and time.monotonic() - began > limit:
                raise self._no_answer((word - 2) // 3, limit)

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
    return mmap.mmap(descriptor, SharedMemoryRanks.memory_bytes(size))


def create_memory(size: int) -> int:
    """Create memory for so many ranks; return its file descriptor. It has no name: it ends with the last process."""
    descriptor = os.memfd_create("workbench-ranks", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, SharedMemoryRanks.memory_bytes(size))
    return descriptor
