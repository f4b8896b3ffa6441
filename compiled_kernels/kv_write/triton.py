"""Implement the KV write in Triton with one program per token, which writes all its key/value heads."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from compiled_kernels.triton_code.launch import KernelLaunch, check, power_of_two, run


@triton.jit
def write_rows(
    pages, rows, slots, groups, dim, page_stride, group_stride, offset_stride, dim_stride,
    row_token, row_group, row_dim, slot_stride, SIZE: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token * slot_stride).to(tl.int64)
    group = tl.arange(0, GROUPS)[:, None]
    column = tl.arange(0, DIM)[None, :]
    inside = (group < groups) & (column < dim)
    values = tl.load(rows + token * row_token + group * row_group + column * row_dim, mask=inside)
    at = pages + slot // SIZE * page_stride + group * group_stride + slot % SIZE * offset_stride
    tl.store(at + column * dim_stride, values.to(pages.dtype.element_ty), mask=inside)


def plan(pages: Tensor, rows: Tensor, slots: Tensor) -> tuple[list[KernelLaunch], None]:
    check("kv_write", pages, rows)
    tokens, groups, dim = rows.shape
    arguments = {
        "pages": pages, "rows": rows, "slots": slots, "groups": groups, "dim": dim,
        "page_stride": pages.stride(0), "group_stride": pages.stride(1), "offset_stride": pages.stride(2),
        "dim_stride": pages.stride(3), "row_token": rows.stride(0), "row_group": rows.stride(1),
        "row_dim": rows.stride(2), "slot_stride": slots.stride(0), "SIZE": pages.shape[2],
        "GROUPS": power_of_two(groups), "DIM": power_of_two(dim),
    }  # fmt: skip
    return [KernelLaunch(write_rows, (tokens,), arguments)], None


def kv_write(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    run(*plan(pages, rows, slots))
