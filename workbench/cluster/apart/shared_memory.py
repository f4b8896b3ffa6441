"""Map the pages of a cache into several processes of one host.

The memory is a file without a name (`memfd_create`): others open it through the process that made it. So nothing is
left in /dev/shm by any death, of one process or of all: the kernel frees it with its last mapping.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from workbench.cluster.apart.lending import SharedPagePool
from workbench.errors import WorkbenchError
from workbench.kv_cache.store import KVStore

ALIGNMENT = 4096  # bytes: each tensor begins a memory page, and so any vector's alignment holds


class MemoryAddress(NamedTuple):
    """The place at which another process of this host finds a memory: the file `fd` of process `pid`, which made it."""

    pid: int
    fd: int
    inode: int
    size: int


class SharedMemory:
    """Bytes that several processes map. The process that made it owns it: others can open it while that one lives, and
    keep what they have opened."""

    def __init__(self, fd: int, size: int):
        self.size, self._fd = size, fd
        try:
            self._map = mmap.mmap(fd, size)
        except OSError as error:
            raise WorkbenchError(
                f"shared pages: cannot map {size} bytes ({error.strerror}); give fewer pages"
            ) from None

    @classmethod
    def create(cls, size: int) -> SharedMemory:
        """Make a memory of `size` bytes, all zero.

        Raises:
            WorkbenchError: where the system has no such files (it must be Linux).
        """
        if not hasattr(os, "memfd_create"):
            raise WorkbenchError("shared pages: this system has no memfd_create, which Linux has; send copies instead")
        fd = os.memfd_create("workbench-pages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size)
        import fcntl  # other systems lack it

        # What a process has mapped stays: reading beyond the end of a file that shrank would kill it.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return cls(fd, size)

    @classmethod
    def open(cls, address: MemoryAddress) -> SharedMemory:
        """Map the memory of another process.

        Raises:
            WorkbenchError: if that process has ended.
        """
        try:
            fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            message = f"shared pages: process {address.pid}, which owns them, cannot be reached ({error.strerror})"
            raise WorkbenchError(f"{message}; it must run on this host, as the same user") from None
        try:
            found = os.fstat(fd)
            if (found.st_ino, found.st_size) != (address.inode, address.size):
                raise WorkbenchError(f"shared pages: process {address.pid} has another file there; its owner has ended")
            return cls(fd, address.size)
        except BaseException:
            with contextlib.suppress(OSError):
                os.close(fd)
            raise

    @property
    def address(self) -> MemoryAddress:
        """Return the address of a memory that this process made."""
        return MemoryAddress(os.getpid(), self._fd, os.fstat(self._fd).st_ino, self.size)

    def tensor(self) -> Tensor:
        """Return its bytes, uint8 [size], mapped as long as any view of them lives."""
        return torch.frombuffer(self._map, dtype=torch.uint8)

    def close(self) -> None:
        """Close the file; what is mapped stays mapped."""
        with contextlib.suppress(OSError):
            os.close(self._fd)
        self._fd = -1


def move_into(store: KVStore, memory: SharedMemory) -> None:
    """Make the tensors of `store` views of `memory`, one after another; what lies there stays.

    Raises:
        WorkbenchError: if the memory has another size than the store's tensors take.
    """
    if memory.size != (needed := shared_bytes(store)):
        raise WorkbenchError(f"shared pages: {memory.size} bytes are mapped, this cache takes {needed}")
    whole, begin = memory.tensor(), 0

    def put(tensor: Tensor) -> Tensor:
        nonlocal begin
        view = whole[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        begin += aligned(tensor.nbytes)
        return view

    store.move(put)


def shared_bytes(store: KVStore) -> int:
    """Return the bytes of a memory for the tensors of `store`, which may be on the meta device."""
    total = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal total
        total += aligned(tensor.nbytes)
        return tensor

    store.move(count)
    return max(total, ALIGNMENT)


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class SharedPages:
    """One process's part of a shared memory of pages.

    Args:
        memory: the memory, mapped.
        totals: pages of all processes by cache group, besides the null page.
        homes: this process's own pages, by cache group.
        lent: loans by page of a predecessor that died, by cache group.
    """

    memory: SharedMemory
    totals: tuple[int, ...]
    homes: tuple[range, ...]
    lent: tuple[dict[int, int], ...] = ()

    def build(
        self, build_store: Callable[[tuple[int, ...], str], KVStore]
    ) -> tuple[KVStore, tuple[SharedPagePool, ...]]:
        """Return the store that `build_store` makes of numbers of pages and a device, in this memory, and its pools."""
        store = build_store(self.totals, "meta")
        move_into(store, self.memory)
        lent = self.lent or ({},) * len(self.homes)
        pools = zip(self.totals, self.homes, lent, strict=True)
        return store, tuple(SharedPagePool(total, store.page_size, home, owed) for total, home, owed in pools)


def assign_homes(counts: list[tuple[int, ...]]) -> tuple[tuple[int, ...], list[tuple[range, ...]]]:
    """Cut the pages of a memory into homes, one after another.

    Args:
        counts: the pages of each process, by cache group.

    Returns:
        the pages of all of them by cache group, and the homes of each process by cache group.
    """
    begins = [1] * len(counts[0])
    homes = []
    for mine in counts:
        homes.append(tuple(range(begin, begin + count) for begin, count in zip(begins, mine, strict=True)))
        begins = [begin + count for begin, count in zip(begins, mine, strict=True)]
    return tuple(begin - 1 for begin in begins), homes
