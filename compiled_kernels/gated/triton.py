"""Compute gates elementwise in Triton; a row has the gate's columns in its first half, those of up in its second."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from compiled_kernels.triton_code.launch import KernelLaunch, ceil_div, check, power_of_two, run

COLUMNS = 1024  # maximum columns per program: eight per thread, sixteen bytes of bfloat16
SILU, GELU, CLAMPED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def gate_times_up(
    gate_up, out, hidden, row_stride, column_stride, alpha, limit, COLUMNS: tl.constexpr, KIND: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < hidden
    at = gate_up + row * row_stride
    gate = tl.load(at + column * column_stride, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + (hidden + column) * column_stride, mask=inside, other=0.0).to(tl.float32)
    slope = gate
    if KIND == GELU:
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # sqrt(8 / pi)
    if KIND == CLAMPED:
        # Comparisons in place of min and max keep a NaN.
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)) + 1.0
        slope = alpha * gate
    tl.store(out + row * hidden + column, gate / (1.0 + tl.exp(-slope)) * up, mask=inside)


def plan(
    gate_up: Tensor, operator: str = "gated_silu", alpha: float = 0.0, limit: float = 0.0
) -> tuple[list[KernelLaunch], Tensor]:
    check(operator, gate_up)
    tokens, hidden = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, hidden)
    columns = min(COLUMNS, power_of_two(hidden))
    kind = {"gated_silu": SILU, "gated_gelu": GELU, "gated_clamped": CLAMPED}[operator]
    arguments = {
        "gate_up": gate_up, "out": out, "hidden": hidden, "row_stride": gate_up.stride(0),
        "column_stride": gate_up.stride(1), "alpha": alpha, "limit": limit, "COLUMNS": columns, "KIND": kind.value,
    }  # fmt: skip
    return [KernelLaunch(gate_times_up, (tokens, ceil_div(hidden, columns)), arguments)], out


def gated_silu(gate_up: Tensor) -> Tensor:
    return run(*plan(gate_up))


def gated_gelu(gate_up: Tensor) -> Tensor:
    return run(*plan(gate_up, "gated_gelu"))


def gated_clamped(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    return run(*plan(gate_up, "gated_clamped", alpha, limit))
