"""Store the keys and values of new tokens in their pages."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor


def kv_write(
    pages: Float[Tensor, "page group offset dim"],
    rows: Float[Tensor, "token group dim"],
    slots: Int[Tensor, " token"],
) -> None:
    """Put `rows` at `slots`, in place; slot = page * (tokens a page) + offset."""
    size = pages.shape[2]
    pages[slots // size, :, slots % size] = rows.to(pages.dtype)
