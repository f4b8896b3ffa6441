"""Store the keys or values of new tokens in their pages."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from compiled_kernels.backends import Backend
from compiled_kernels.operators import define_operator

KV_WRITE = define_operator(
    "kv_write",
    "(Tensor(a!) pages, Tensor rows, Tensor slots) -> ()",
    lambda pages, rows, slots: None,
    {
        Backend.TRITON: "compiled_kernels.kv_write.triton:kv_write",
        Backend.MLIR: "compiled_kernels.kv_write.mlir:kv_write",
    },
)


def kv_write(
    pages: Float[Tensor, "page group offset dim"],
    rows: Float[Tensor, "token group dim"],
    slots: Int[Tensor, " token"],
    backend: Backend = Backend.EAGER,
) -> None:
    """Write `rows` to `slots` in place; slot = page * (tokens per page) + offset. Slots are distinct, except those of
    the null page (page 0), which has arbitrary contents.
    """
    if backend not in (Backend.EAGER, Backend.INDUCTOR):
        KV_WRITE.implementation(backend)(pages, rows, slots)
        return
    size = pages.shape[2]
    pages[slots // size, :, slots % size] = rows.to(pages.dtype)


def kv_write_reference(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Write one row after another: the specification."""
    size = pages.shape[2]
    for row, slot in zip(rows, slots.tolist(), strict=True):
        page, offset = divmod(slot, size)
        pages[page, :, offset] = row.to(pages.dtype)
