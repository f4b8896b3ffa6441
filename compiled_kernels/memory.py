"""Allocate memory that the system provides page by page, when it is written."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

MAPPED_BYTES = 1 << 20  # larger tensors are mapped separately


def zero_pages(shape: tuple[int, ...], dtype: torch.dtype, device: str | torch.device = "cpu") -> Tensor:
    """Return a tensor of zeros. A large tensor on the CPU takes memory only where it is written, and returns it to the
    system when it is freed.

    malloc would keep freed memory for the thread that it was allocated by, and `torch.zeros` would write all of it.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < MAPPED_BYTES or str(device) != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE), dtype=dtype).view(shape)
