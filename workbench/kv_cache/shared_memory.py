"""Map the pages of a cache into several processes of one host, and describe them so that processes can compare.

The memory is a file without a name (`memfd_create`): others open it through the process that made it. So nothing is
left in /dev/shm by any death, of one process or of all: the kernel frees it with its last mapping.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from workbench.errors import WorkbenchError
from workbench.kv_cache.pages import NULL_PAGE
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
        begin += _aligned(tensor.nbytes)
        return view

    store.move(put)


def shared_bytes(store: KVStore) -> int:
    """Return the bytes of a memory for the tensors of `store`, which may be on the meta device."""
    total = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal total
        total += _aligned(tensor.nbytes)
        return tensor

    store.move(count)
    return max(total, ALIGNMENT)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class PageTensor(NamedTuple):
    """One tensor of a cache group: the shape of a page and its type."""

    group: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def page_bytes(self) -> int:
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize


@dataclass(frozen=True)
class PageLayout:
    """The contents of a cache's pages, byte by byte. Two engines hand pages over if theirs are equal."""

    model: str  # a digest of its architecture and of some weights
    page_size: int
    groups: tuple[str, ...]  # windows, sinks, residuals, by cache group
    tensors: tuple[PageTensor, ...]  # in the order of layers

    @classmethod
    def describe(cls, store: KVStore, model: str) -> PageLayout:
        """Describe `store`, whose tensors may be on the meta device."""
        tensors = []
        for layer in store.layers:
            for group in range(len(store.groups)):
                for tensor in layer.page_tensors(group):
                    if not tensor.is_contiguous():
                        raise WorkbenchError("shared pages: a tensor of the cache is not contiguous")
                    tensors.append(PageTensor(group, tuple(tensor.shape[1:]), str(tensor.dtype).removeprefix("torch.")))
        return cls(model, store.page_size, tuple(map(str, store.groups)), tuple(tensors))

    def memory_bytes(self, totals: tuple[int, ...]) -> int:
        """Return the bytes of a memory of so many pages, by cache group, as `shared_bytes` of their store."""
        return max(sum(_aligned(each.page_bytes * (totals[each.group] + 1)) for each in self.tensors), ALIGNMENT)

    def bytes_of(self, pages: tuple[tuple[int, ...], ...]) -> int:
        """Return the bytes of these pages, by cache group, in all layers; null pages have none."""
        counts = [sum(page != NULL_PAGE for page in each) for each in pages]
        return sum(each.page_bytes * counts[each.group] for each in self.tensors)

    def differences(self, other: PageLayout) -> list[str]:
        """Return what differs, one line each: empty where pages may be handed over."""
        found = []
        if self.model != other.model:
            found.append("the models or their weights differ")
        if self.page_size != other.page_size:
            found.append(f"cache.page_size {self.page_size} and {other.page_size}")
        if len(self.groups) != len(other.groups):
            found.append(f"{len(self.groups)} and {len(other.groups)} cache groups")
        pairs = zip(self.groups, other.groups, strict=False)
        found += [f"cache group {t}: {mine} and {theirs}" for t, (mine, theirs) in enumerate(pairs) if mine != theirs]
        if len(self.tensors) != len(other.tensors):
            found.append(f"{len(self.tensors)} and {len(other.tensors)} tensors")
        for number, (mine, theirs) in enumerate(zip(self.tensors, other.tensors, strict=False)):
            if mine != theirs:
                found.append(f"tensor {number}: pages {_words(mine)} and {_words(theirs)}")
                break  # one format differs in all its layers
        return found

    def check_equal(self, other: PageLayout, mine: str = "one engine", theirs: str = "the other") -> None:
        """Refuse to hand over pages of another layout (WorkbenchError, with what differs)."""
        if found := self.differences(other):
            raise WorkbenchError(
                f"pages of {mine} are no pages of {theirs}: {'; '.join(found)}; give both the same model and cache"
            )


def _words(tensor: PageTensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype} (group {tensor.group})"


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

    def store(self, build: Callable[[tuple[int, ...], str], KVStore]) -> KVStore:
        """Return the store that `build` makes of numbers of pages and a device, in this memory."""
        made = build(self.totals, "meta")
        move_into(made, self.memory)
        return made


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
