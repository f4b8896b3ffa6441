"""Map the pages of a cache into several processes of one host.

The memory is an anonymous file (`memfd_create`) that others open through the process that made it. Nothing is left in
/dev/shm when processes die: the kernel frees the memory with its last mapping.
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

ALIGNMENT = 4096  # bytes: each tensor starts at a memory page, aligned for any vector


class MemoryAddress(NamedTuple):
    """The address by which other processes of this host find a memory: file `fd` of the process `pid` that made it."""

    pid: int
    fd: int
    inode: int
    size: int


class SharedMemory:
    """Memory that several processes map. Others can open it while the process that made it lives, and keep their
    mappings after that."""

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
            WorkbenchError: if the system has no `memfd_create` (it must be Linux).
        """
        if not hasattr(os, "memfd_create"):
            raise WorkbenchError("shared pages: this system has no memfd_create, which Linux has; send copies instead")
        fd = os.memfd_create("workbench-pages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size)
        import fcntl  # other systems lack it

        # Seal the size: reading a mapping beyond the end of a file that shrank would kill the process.
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
        """Return the address of this memory; this process must have made it."""
        return MemoryAddress(os.getpid(), self._fd, os.fstat(self._fd).st_ino, self.size)

    def tensor(self) -> Tensor:
        """Return the memory as uint8 [size], mapped as long as any view of it lives."""
        return torch.frombuffer(self._map, dtype=torch.uint8)

    def close(self) -> None:
        """Close the file; existing mappings stay."""
        with contextlib.suppress(OSError):
            os.close(self._fd)
        self._fd = -1


def move_into(store: KVStore, memory: SharedMemory) -> None:
    """Make the tensors of `store` views of `memory`, one after another, without changing its bytes.

    Raises:
        WorkbenchError: if the size of the memory differs from that of the store's tensors.
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
    """Return the size in bytes of a memory for the tensors of `store`, which may be on the meta device."""
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
        totals: number of pages of all processes by cache group, without the null page.
        homes: this process's home pages, by cache group.
        lent: number of loans by page, given by a predecessor that died, by cache group.
    """

    memory: SharedMemory
    totals: tuple[int, ...]
    homes: tuple[range, ...]
    lent: tuple[dict[int, int], ...] = ()

    def build(
        self, build_store: Callable[[tuple[int, ...], str], KVStore]
    ) -> tuple[KVStore, tuple[SharedPagePool, ...]]:
        """Return (cache store, its page pools), with all pages in this memory; `build_store` takes page counts and a
        device.
        """
        store = build_store(self.totals, "meta")
        move_into(store, self.memory)
        lent = self.lent or ({},) * len(self.homes)
        pools = zip(self.totals, self.homes, lent, strict=True)
        return store, tuple(SharedPagePool(total, store.page_size, home, owed) for total, home, owed in pools)


def assign_homes(counts: list[tuple[int, ...]]) -> tuple[tuple[int, ...], list[tuple[range, ...]]]:
    """Divide the pages of a memory among processes: each gets consecutive pages, its home.

    Args:
        counts: number of pages of each process, by cache group.

    Returns:
        the total number of pages by cache group, and the homes of each process by cache group.
    """
    begins = [1] * len(counts[0])
    homes = []
    for mine in counts:
        homes.append(tuple(range(begin, begin + count) for begin, count in zip(begins, mine, strict=True)))
        begins = [begin + count for begin, count in zip(begins, mine, strict=True)]
    return tuple(begin - 1 for begin in begins), homes
