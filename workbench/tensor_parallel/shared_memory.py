r"""Implement torch.distributed's collective calls in memory shared by the ranks of one host.

    word of a rank   | round (12 bits) | number of its last call in this round (20 bits) |
    slots of a rank  | calls with an even number | calls with an odd number |

In a call, a rank writes its data to its slot, announces the call, waits until the sending ranks have announced it, and
reads their slots. It writes only after all ranks have announced the previous call: a rank that announces call i + 1 has
read call i. Unlike gloo's, calls can be cancelled: a rank that abandons a call begins the next round, and ranks that
wait for it follow.
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
OFFER = "workbench/offer"  # store key: the location of rank 0's memory
ANSWER = "workbench/answer/{}"  # store key of a rank: its process id, or why it cannot map the memory
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
REMEDY = "take transport: gloo"
CALLS, ROUNDS = 2**20, 2**12  # numbers wrap around: no rank is behind by half of them
MAX_SLEEP_SECONDS = 60.0  # per system call
SPINS = 60  # reads of a word before a system call, about 20 microseconds


class SharedMemoryGroup(ProcessGroup):
    """A process group of ranks that map the same memory; each call must end before the next begins."""

    def __init__(self, memory: mmap.mmap, rank: int, size: int):
        """Join the group; `memory` has `memory_bytes(size)` bytes, initially zero."""
        super().__init__(rank, size)  # type: ignore[call-arg] (the stubs lack this form)
        self.others = [other for other in range(size) if other != rank]
        self._rank, self._round, self._number, self._words = rank, 0, 0, Words(memory, size)
        with torch.inference_mode(False):  # written both inside and outside of inference mode
            mapped = torch.frombuffer(memory, dtype=torch.uint8)
            self._slots = mapped[_page_aligned(Words.bytes_of(size)) :].view(2, size, CHUNK_BYTES).unbind()

    @staticmethod
    def memory_bytes(size: int) -> int:
        return _page_aligned(Words.bytes_of(size)) + size * 2 * CHUNK_BYTES

    def restart(self, left_for: int | None = None) -> None:
        """Abandon the collective calls of this round, and begin the next round, or the round `left_for` that another
        rank has begun.
        """
        self._round, self._number = (self._round + 1) % ROUNDS if left_for is None else left_for, 0
        self._words.publish(self._rank, self._round * CALLS)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Work:
        """Send the root's tensor, of at most `CHUNK_BYTES`, to all ranks."""
        root = _root(opts)
        return self._call(tensors[0], {}) if self._rank == root else self._call(None, {root: tensors[0]})

    def allgather(self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], _opts: Any = None) -> Work:
        """Send the tensors of all ranks, of at most `CHUNK_BYTES` each, to all ranks."""
        return self._call(input_tensors[0], dict(enumerate(output_tensors[0])))

    def gather(self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any = None) -> Work:
        """Send the tensors of all ranks to the root."""
        places = output_tensors[0] if self._rank == _root(opts) else ()
        return self._call(input_tensors[0], dict(enumerate(places)))

    def _call(self, own: Tensor | None, places: dict[int, Tensor]) -> Work:
        """Begin a call, which writes `own` after the previous call has ended, and reads data of ranks into `places`."""
        self._number = (self._number + 1) % CALLS
        like = own if own is not None else next(iter(places.values()))
        rows = self._slots[self._number % 2][:, : like.nbytes].view(like.dtype).unbind()
        return SharedMemoryCall(self, self._number, rows, own, places)

    def write(self, number: int, rows: Sequence[Tensor], own: Tensor | None) -> None:
        """Write the tensors `own` to this rank's slot, and announce the collective call."""
        if own is not None:
            rows[self._rank].copy_(own.view(-1))
        self._words.publish(self._rank, self._round * CALLS + number)

    def reached(self, rank: int, number: int, until: float) -> bool:
        """Wait until a rank has announced a call of this round, at most until time `until`; return whether it has.

        Raises:
            TaskAbandoned: if that rank has left this round.
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
    """A collective call in progress. This rank writes after the previous call has ended, and reads after the sending
    ranks have announced the call.
    """

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
        self.awaited: int | None = None  # the rank that did not answer in time

    def is_completed(self) -> bool:
        return self._advance(0.0)

    def wait(self, timeout: timedelta = timedelta.max) -> bool:
        """Wait until the call has ended; RuntimeError after `timeout`, as in torch.distributed."""
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
    """Create the shared memory on rank 0, or map it on another rank, and return the process group. The memory has no
    name: other ranks open it by its descriptor, as `/proc/PID/fd/NUMBER`, and it is freed with the last process.

    Raises:
        WorkbenchError: if a rank is on another host than rank 0, or may not open the memory.
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
    weakref.finalize(group, os.close, memory)  # rank 0's descriptor stays open for ranks that join later
    return group


def processes_of(store: Any, rank: int, size: int) -> dict[int, int]:
    """Return the process ids, by rank, of the ranks that a rank monitors: rank 0 monitors all other ranks, after they
    have mapped its memory; other ranks monitor rank 0.

    Raises:
        WorkbenchError: if a process does not join, or reports why it cannot map the memory.
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
            f"transport shared_memory: this rank runs on {platform.node()} and rank 0 on {offer['name']}; {REMEDY}"
        )
    try:
        memory = os.open(offer["path"], os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise WorkbenchError(
            f"transport shared_memory: cannot open rank 0's memory at {offer['path']} ({error.strerror}): all must "
            f"be processes of one user and one container; {REMEDY}"
        ) from None
    found = os.fstat(memory)
    if [found.st_dev, found.st_ino] != offer["file"]:  # this pid is another process: rank 0 is in a container
        os.close(memory)
        raise WorkbenchError(f"transport shared_memory: this rank sees other processes than rank 0; {REMEDY}")
    return memory


def _host() -> str:
    """Return an identifier of this host since its boot: host names may be equal."""
    return BOOT_ID.read_text().strip()


Backend.register_backend(NAME, lambda store, rank, size, timeout: open_group(store, rank, size), devices=["cpu"])
