"""Swap pages out to CPU memory, or to a memory-mapped file, and back in unchanged."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import weakref
import zlib
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from workbench.errors import WorkbenchError
from workbench.kv_cache.pages import PagePool, PageTransfers
from workbench.kv_cache.settings import FileOffload, MemoryOffload, NoOffload
from workbench.kv_cache.store import KVStore

MAGIC = b"pages of an inference workbench; may be deleted when no runner uses it\n"
STAT_BLOCK = 512  # bytes of a block in `stat`
HEADER = 4096  # bytes of the file's header


class CPUPageStore:
    """The contents of CPU pages for every cache group of `store`, `size` bytes in all.

    Checksums of pages stay in memory, so damaged contents are detected on load.
    """

    def __init__(self, store: KVStore, size: int, path: str | None = None):
        self.store = store
        self.page_bytes = [sum(t[0].nbytes for t in store.page_tensors(table)) for table in range(len(store.groups))]
        wanted = sum(pages * each for pages, each in zip(store.num_pages, self.page_bytes, strict=True))
        counts = [pages * size // wanted for pages in store.num_pages]
        if not all(counts):
            least = max(-(-wanted // pages) for pages in store.num_pages)
            raise WorkbenchError(f"offload: {size} bytes cannot hold a page of every layer; give at least {least}")
        self.cpu_pools = tuple(PagePool(count, store.page_size) for count in counts)
        total = sum(count * each for count, each in zip(counts, self.page_bytes, strict=True))
        self.file = None if path is None else PageFile(Path(path), HEADER + total)
        whole = torch.empty(total, dtype=torch.uint8) if self.file is None else self.file.mapped()[HEADER:]
        self._pages: list[Tensor] = []
        for count, each in zip(counts, self.page_bytes, strict=True):
            mine, whole = whole[: count * each], whole[count * each :]
            self._pages.append(mine.view(count, each))
        self._sums: dict[tuple[int, int], int] = {}
        self._unsaved: dict[tuple[int, int], str] = {}  # (group, CPU page) -> why it was not saved

    def swap_out(self, group: int, page: int, cpu_page: int) -> None:
        """Copy `page` of a group to CPU page `cpu_page`."""
        self._sums.pop((group, cpu_page), None)
        try:
            self._check_file(self.page_bytes[group])
        except WorkbenchError as error:
            self._unsaved[group, cpu_page] = str(error)
            raise
        self._unsaved.pop((group, cpu_page), None)
        begin, there = 0, self._pages[group][cpu_page - 1]
        for tensor in self.store.page_tensors(group):
            raw = _bytes(tensor[page])
            there[begin : begin + len(raw)] = raw
            begin += len(raw)
        self._sums[group, cpu_page] = _checksum(there)

    def swap_in(self, group: int, cpu_page: int, page: int) -> None:
        """Copy CPU page `cpu_page` back to `page`.

        Raises:
            WorkbenchError: if the contents differ from the saved contents.
        """
        if (group, cpu_page) in self._unsaved:
            raise WorkbenchError(f"{self._unsaved[group, cpu_page]}; a page was not saved; its request cannot continue")
        self._check_file()
        there = self._pages[group][cpu_page - 1]
        if (group, cpu_page) not in self._sums or _checksum(there) != self._sums[group, cpu_page]:
            where = "host memory" if self.file is None else str(self.file.path)
            raise WorkbenchError(f"offload: a page in {where} differs from the saved page; its request cannot continue")
        begin = 0
        for tensor in self.store.page_tensors(group):
            count = tensor[page].nbytes
            tensor[page] = there[begin : begin + count].clone().view(tensor.dtype).view(tensor[page].shape)
            begin += count

    def _check_file(self, to_write: int = 0) -> None:
        if self.file is not None:
            self.file.check(to_write)


class PageFile:
    """A file of pages, locked during a runner's life and removed at its end."""

    def __init__(self, path: Path, size: int):
        self.path, self.size = path, size
        if importlib.util.find_spec("fcntl") is None or not hasattr(os, "posix_fallocate"):
            raise WorkbenchError("offload: pages can lie in a file on Linux only; set offload: memory")
        try:
            # The file stays open while its pages are mapped; unbuffered, closing it writes nothing.
            self._handle = open(path, "a+b", buffering=0)  # noqa: SIM115 (closed with the store)
        except OSError as error:
            raise WorkbenchError(f"offload: cannot write {path} ({error.strerror}); name a file in a folder") from None
        try:
            self._claim()
        except BaseException:
            self._handle.close()
            raise
        self._known = os.fstat(self._handle.fileno())
        weakref.finalize(self, _remove, self._handle, path, self._known.st_ino)

    def _claim(self) -> None:
        import fcntl  # other systems lack it; there pages can be kept in memory

        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise WorkbenchError(f"offload: {self.path} is in use by another runner; name another file") from None
        self._handle.seek(0)
        if self._handle.read(len(MAGIC)) not in (b"", MAGIC):
            raise WorkbenchError(f"offload: {self.path} holds something else; name a file that does not exist yet")
        try:
            self._handle.truncate(0)
            self._handle.write(MAGIC)
            os.posix_fallocate(self._handle.fileno(), 0, self.size)  # a full disk is detected here, not by a signal
        except OSError as error:
            self.path.unlink(missing_ok=True)
            raise WorkbenchError(
                f"offload: {self.path} cannot take {self.size} bytes ({error.strerror}); make room there, name "
                "a file elsewhere, or give it fewer bytes"
            ) from None

    def mapped(self) -> Tensor:
        return torch.from_file(str(self.path), shared=True, size=self.size, dtype=torch.uint8)

    def check(self, to_write: int = 0) -> None:
        """Check the file before it is read or written.

        Reading beyond the end of a mapped file kills the process, and so does writing to a full disk. Disk space was
        allocated when the file was created, except on copy-on-write file systems, which cannot reserve it.
        """
        try:
            found = os.stat(self.path)
        except OSError:
            raise WorkbenchError(f"offload: {self.path} is gone; leave the file while the runner lives") from None
        if (found.st_ino, found.st_size) != (self._known.st_ino, self.size):
            raise WorkbenchError(f"offload: {self.path} has {found.st_size} bytes where {self.size} were written")
        if to_write and found.st_blocks * STAT_BLOCK < self.size:
            place = os.statvfs(self.path)
            if place.f_bavail * place.f_frsize < to_write:
                raise WorkbenchError(f"offload: {self.path} has no room for a page: its disk is full; make room there")


def open_offload(store: KVStore, offload: NoOffload | MemoryOffload | FileOffload) -> CPUPageStore | None:
    """Create the store of CPU pages for an offload setting; None without offloading."""
    if isinstance(offload, NoOffload):
        return None
    return CPUPageStore(store, offload.bytes, offload.path if isinstance(offload, FileOffload) else None)


def transfer_pages(transfers: PageTransfers, store: KVStore, cpu_store: CPUPageStore | None) -> dict[str, str]:
    """Execute the swap-outs, copies and swap-ins of a step, in this order; return an error for each request that lost
    pages.
    """
    faults: dict[str, str] = {}
    if cpu_store is not None:
        for table, page, place in transfers.swap_outs:
            with contextlib.suppress(WorkbenchError):  # reported when the page is loaded
                cpu_store.swap_out(table, page, place)
    for table in {table for table, *_ in transfers.copies}:
        pairs = [(source, target) for at, source, target in transfers.copies if at == table]
        store.copy_pages(table, [source for source, _ in pairs], [target for _, target in pairs])
    if cpu_store is not None:
        for request, table, place, page in transfers.swap_ins:
            if request not in faults:
                try:
                    cpu_store.swap_in(table, place, page)
                except WorkbenchError as error:
                    faults[request] = str(error)
    return faults


def _bytes(page: Tensor) -> Tensor:
    return page.contiguous().view(-1).view(torch.uint8).cpu()


def _checksum(raw: Tensor) -> int:
    return zlib.crc32(raw.numpy().data)


def _remove(handle: Iterable, path: Path, inode: int) -> None:
    with contextlib.suppress(OSError):
        if os.stat(path).st_ino == inode:
            path.unlink()
    handle.close()  # type: ignore[attr-defined] (a file or a map)
