"""Memory that the system provides page by page, as it is written."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

MAPPED_BYTES = 1 << 20  # a larger tensor has pages of its own


def zero_pages(shape: tuple[int, ...], dtype: torch.dtype, device: str | torch.device = "cpu") -> Tensor:
    """Return zeros. Where they are large, on the processor, their memory is resident once it is written, and goes back
    to the system as soon as it is freed.

    What malloc has given to one thread and gets back it keeps for that thread; `torch.zeros` writes.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < MAPPED_BYTES or str(device) != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE), dtype=dtype).view(shape)
