from __future__ import annotations

from torch import Tensor


def reference(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    size = pages.shape[2]
    for row, slot in zip(rows, slots.tolist(), strict=True):
        page, offset = divmod(slot, size)
        pages[page, :, offset] = row.to(pages.dtype)
