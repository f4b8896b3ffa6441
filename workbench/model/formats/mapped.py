"""Map files into memory: tensors are views of the mapped file, and pages that were read can be returned to the
system.
"""

from __future__ import annotations

import mmap
import os
import weakref
from pathlib import Path

import torch
from torch import Tensor

from workbench.errors import WorkbenchError

_mapped: weakref.WeakKeyDictionary[mmap.mmap, tuple[int, int]] = weakref.WeakKeyDictionary()  # first and last address


class MappedFile:
    """A file mapped privately into memory: writes to a view do not change the file. It stays mapped as long as a view
    of it is in use.
    """

    def __init__(self, path: Path):
        self._path = path
        with path.open("rb") as stream:
            self._map = mmap.mmap(stream.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        first = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()
        _mapped[self._map] = first, first + len(self._map)

    def tensor(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Return the tensor of `shape` stored from byte `offset` on: a view, or a copy if it is unaligned for the
        type.
        """
        count = torch.Size(shape).numel()
        if not count:
            return torch.empty(shape, dtype=dtype)
        if offset % dtype.itemsize:
            raw = torch.frombuffer(self._map, dtype=torch.uint8, offset=offset, count=count * dtype.itemsize)
            return raw.clone().view(dtype).view(shape)
        return torch.frombuffer(self._map, dtype=dtype, offset=offset, count=count).view(shape)

    def read_into(self, offset: int, out: Tensor) -> None:
        """Read bytes from `offset` on into the contiguous tensor `out`; other threads continue, and no page is
        mapped.
        """
        rest = out.view(-1).view(torch.uint8).numpy().data
        try:
            with self._path.open("rb", buffering=0) as stream:
                while rest:
                    if not (size := os.preadv(stream.fileno(), [rest], offset)):
                        raise WorkbenchError(f"{self._path}: became shorter while it was read; fetch the file again")
                    rest, offset = rest[size:], offset + size
        except OSError as error:
            raise WorkbenchError(f"{self._path}: cannot be read ({error.strerror or error})") from error


def release(tensor: Tensor) -> None:
    """Return the memory of a view's pages to the system; a later access reads them from the file again.

    No effect for other tensors. Pages shared with neighbouring tensors stay in memory.
    """
    first = tensor.data_ptr()
    for mapped, (start, end) in list(_mapped.items()):
        if start <= first < end:
            page = mmap.PAGESIZE
            low, high = -(-(first - start) // page) * page, (first - start + tensor.nbytes) // page * page
            if high > low:
                mapped.madvise(mmap.MADV_DONTNEED, low, high - low)
