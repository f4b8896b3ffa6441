r"""Carry out torch.distributed's collective calls in a memory that the ranks of one host share.

    word of a rank   | round (12 bits) | number of its last call in this round (20 bits) |
    slots of a rank  | calls with an even number | calls with an odd one |

In a call a rank writes what it gives to its slot, announces the call, waits for those that give, and reads. It writes
only once all have announced the call before: a rank that announces call i + 1 has read call i. Other than gloo's, calls
can be taken back: a rank that leaves begins the next round, and those that wait for it do too.
"""

from __future__ import annotations

import json
import mmap
import os
import platform
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Backend, ProcessGroup, Work

from workbench.errors import WorkbenchError
from workbench.tensor_parallel.distributed import get_said
from workbench.tensor_parallel.futex import Words
from workbench.tensor_parallel.ranks import CHUNK_BYTES, TaskAbandoned

NAME = "shared_memory"
OFFER = "workbench/offer"  # in the store: where rank 0's memory lies
ANSWER = "workbench/answer/{}"  # of a rank: its process, or why it cannot map the memory
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
REMEDY = "take transport: gloo"
CALLS, ROUNDS = 2**20, 2**12  # numbers go round: no rank is half as many behind
MAX_SLEEP_SECONDS = 60.0  # at a time
SPINS = 60  # looks at a word before the system is asked, about 20 microseconds


class SharedMemoryGroup(ProcessGroup):
    """The ranks that map one memory; a call is waited for before the next one is begun."""

    def __init__(self, memory: mmap.mmap, rank: int, size: int):
        """Take a place among ranks; `memory` has `memory_bytes(size)` bytes, zero at first."""
        super().__init__(rank, size)  # type: ignore[call-arg] (the stubs lack this form)
        self.others = [other for other in range(size) if other != rank]
        self._rank, self._round, self._number, self._words = rank, 0, 0, Words(memory, size)
        with torch.inference_mode(False):  # they are written within that mode and without
            mapped = torch.frombuffer(memory, dtype=torch.uint8)
            self._slots = mapped[_page_aligned(Words.bytes_of(size)) :].view(2, size, CHUNK_BYTES).unbind()

    @staticmethod
    def memory_bytes(size: int) -> int:
        return _page_aligned(Words.bytes_of(size)) + size * 2 * CHUNK_BYTES

    def restart(self, left_for: int | None = None) -> None:
        """Leave the calls of this round for the next one, or for that which another rank has left it for."""
        self._round, self._number = (self._round + 1) % ROUNDS if left_for is None else left_for, 0
        self._words.publish(self._rank, self._round * CALLS)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Work:
        """Give the root's tensor, of at most `CHUNK_BYTES`, to all."""
        root = _root(opts)
        return self._call(tensors[0], {}) if self._rank == root else self._call(None, {root: tensors[0]})

    def allgather(self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], _opts: Any = None) -> Work:
        """Give the tensors of all, of at most `CHUNK_BYTES` each, to all."""
        return self._call(input_tensors[0], dict(enumerate(output_tensors[0])))

    def gather(self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any = None) -> Work:
        """Give the tensors of all to the root."""
        places = output_tensors[0] if self._rank == _root(opts) else ()
        return self._call(input_tensors[0], dict(enumerate(places)))

    def _call(self, own: Tensor | None, places: dict[int, Tensor]) -> Work:
        """Begin a call: write `own` once the call before is over, and read what ranks give to their places."""
        self._number = (self._number + 1) % CALLS
        like = own if own is not None else next(iter(places.values()))
        rows = self._slots[self._number % 2][:, : like.nbytes].view(like.dtype).unbind()
        return SharedMemoryCall(self, self._number, rows, own, places)

    def write(self, number: int, rows: Sequence[Tensor], own: Tensor | None) -> None:
        """Write to this rank's slot, and announce the call."""
        if own is not None:
            rows[self._rank].copy_(own.view(-1))
        self._words.publish(self._rank, self._round * CALLS + number)

    def reached(self, rank: int, number: int, until: float) -> bool:
        """Wait until a rank has announced a call of this round, up to a time; return whether it has.

        Raises:
            TaskAbandoned: if it has left this round.
        """
        if self._has_announced(rank, number) or any(self._has_announced(rank, number) for _ in range(SPINS)):
            return True
        while (seconds := until - time.monotonic()) > 0:
            seen = self._words[rank]
            if self._has_announced(rank, number):
                return True
            self._words.sleep(rank, seen, min(seconds, MAX_SLEEP_SECONDS))
        return self._has_announced(rank, number)

    def _has_announced(self, rank: int, number: int) -> bool:
        round, last = divmod(self._words[rank], CALLS)
        if round == self._round:
            return (last - number) % CALLS < CALLS // 2
        if (round - self._round) % ROUNDS < ROUNDS // 2:
            raise TaskAbandoned(round)
        return False


class SharedMemoryCall(Work):
    """A call under way: what is written once the call before is over, and read once it was announced."""

    def __init__(
        self,
        group: SharedMemoryGroup,
        number: int,
        rows: Sequence[Tensor],
        own: Tensor | None,
        places: Mapping[int, Tensor],
    ):
        super().__init__()
        self._group, self._number, self._rows, self._own, self._places = group, number, rows, own, places
        self._has_written = self._has_read = False
        self.awaited: int | None = None  # the rank that it waited for in vain

    def is_completed(self) -> bool:
        return self._advance(0.0)

    def wait(self, timeout: timedelta = timedelta.max) -> bool:
        """Wait until the call has ended; RuntimeError where it takes longer, as torch.distributed's own."""
        if not self._advance(time.monotonic() + timeout.total_seconds()):
            raise RuntimeError(f"rank {self.awaited} does not answer")
        return True

    def _advance(self, until: float) -> bool:
        if not self._has_written:
            if not self._reached(self._group.others, (self._number - 1) % CALLS, until):
                return False
            self._group.write(self._number, self._rows, self._own)
            self._has_written = True
        if not self._has_read:
            if not self._reached(self._places, self._number, until):
                return False
            for rank, tensor in self._places.items():
                tensor.view(-1).copy_(self._rows[rank])
            self._has_read = True
        return True

    def _reached(self, ranks: Iterable[int], number: int, until: float) -> bool:
        for rank in ranks:
            if not self._group.reached(rank, number, until):
                self.awaited = rank
                return False
        return True


def _root(opts: Any) -> int:
    return 0 if opts is None else opts.rootRank


def _page_aligned(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def open_group(store: Any, rank: int, size: int) -> SharedMemoryGroup:
    """Map one memory into all ranks, which rank 0 makes. It has no name: others open it by its descriptor, as
    `/proc/PID/fd/NUMBER`, and it ends with the last of them.

    Raises:
        WorkbenchError: where a rank is on another host than rank 0, or may not open the memory.
    """
    if rank == 0:
        memory = os.memfd_create("workbench-ranks", os.MFD_CLOEXEC)
        os.ftruncate(memory, SharedMemoryGroup.memory_bytes(size))
        found, pid = os.fstat(memory), os.getpid()
        store.set(OFFER, json.dumps({
            "host": _host(), "name": platform.node(), "pid": pid,
            "path": f"/proc/{pid}/fd/{memory}", "file": [found.st_dev, found.st_ino],
        }))  # fmt: skip
    else:
        try:
            memory = _open_offered(get_said(store, OFFER))
        except WorkbenchError as error:
            store.set(ANSWER.format(rank), json.dumps({"problem": str(error)}))
            raise WorkbenchError(f"parallel.tensor: rank {rank}: {error}") from None
        store.set(ANSWER.format(rank), json.dumps({"pid": os.getpid()}))
    group = SharedMemoryGroup(mmap.mmap(memory, SharedMemoryGroup.memory_bytes(size)), rank, size)
    weakref.finalize(group, os.close, memory)  # rank 0's is opened by others as long as they come
    return group


def processes_of(store: Any, rank: int, size: int) -> dict[int, int]:
    """Return the processes that a rank looks after: on rank 0, once they have mapped its memory, those of all others by
    rank, on others that of rank 0.

    Raises:
        WorkbenchError: where one does not come, or says why it cannot map the memory.
    """
    if rank:
        return {0: get_said(store, OFFER)["pid"]}
    answers = {other: get_said(store, ANSWER.format(other)) for other in range(1, size)}
    for other, answer in answers.items():
        if "problem" in answer:
            raise WorkbenchError(f"parallel.tensor: rank {other}: {answer['problem']}")
    return {other: answer["pid"] for other, answer in answers.items()}


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


def _host() -> str:
    """Return what tells this host from others while it runs: names of hosts may be equal."""
    return BOOT_ID.read_text().strip()


Backend.register_backend(NAME, lambda store, rank, size, timeout: open_group(store, rank, size), devices=["cpu"])
