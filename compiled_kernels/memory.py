"""Memory that the system provides page by page, as it is written, and threads that write it."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

In = TypeVar("In")
Out = TypeVar("Out")
MAPPED_BYTES = 1 << 20  # a larger tensor has pages of its own


def empty_pages(shape: tuple[int, ...], dtype: torch.dtype, device: str | torch.device = "cpu") -> Tensor:
    """Return zeros. Where they are large, on the processor, their memory is resident once it is written, and goes back
    to the system as soon as it is freed.

    What malloc has given to one thread and gets back it keeps for that thread; `torch.zeros` writes.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < MAPPED_BYTES or str(device) != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE), dtype=dtype).view(shape)


def in_threads(work: Callable[[In], Out], items: Iterable[In]) -> list[Out]:
    """Return what `work` gives for each item, several at once, each in one of torch's threads: results do not depend
    on their number."""
    count = torch.get_num_threads()
    if count == 1:
        return list(map(work, items))
    try:
        with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as threads:
            return list(threads.map(work, items))
    finally:
        torch.set_num_threads(count)  # of threads that come after
