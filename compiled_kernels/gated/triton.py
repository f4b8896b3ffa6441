"""Element by element; gate and up lie a row's half apart."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from compiled_kernels.triton_code.launch import Launch, blocks, check, power_of_two, run

COLUMNS = 1024  # a program's most: eight a thread, sixteen bytes of bfloat16


@triton.jit
def gate_times_up(gate_up, out, hidden, row_stride, column_stride, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < hidden
    at = gate_up + row * row_stride
    gate = tl.load(at + column * column_stride, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + (hidden + column) * column_stride, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * hidden + column, gate / (1.0 + tl.exp(-gate)) * up, mask=inside)


def plan(gate_up: Tensor) -> tuple[list[Launch], Tensor]:
    check("gated_silu", gate_up)
    tokens, hidden = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, hidden)
    columns = min(COLUMNS, power_of_two(hidden))
    arguments = {
        "gate_up": gate_up, "out": out, "hidden": hidden, "row_stride": gate_up.stride(0),
        "column_stride": gate_up.stride(1), "COLUMNS": columns,
    }  # fmt: skip
    return [Launch(gate_times_up, (tokens, blocks(hidden, columns)), arguments)], out


def gated_silu(gate_up: Tensor) -> Tensor:
    return run(*plan(gate_up))
