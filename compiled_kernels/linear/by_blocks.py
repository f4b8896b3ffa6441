"""Products in plain torch with matrices in few bits: some rows at a time are numbers, and never the whole matrix."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_kernels.linear.matrix_format import MatrixFormat
from compiled_kernels.linear.quantize import dequantize_matrix
from compiled_kernels.threads import in_threads

BLOCK_VALUES = 1 << 18  # numbers of a block: they and their codes stay in a core's cache


def multiply_by_blocks(
    x: Tensor, parts: tuple[Tensor | None, ...], numbers: Callable[..., Tensor], bias: Tensor | None
) -> Tensor:
    """Return x @ numbers(*parts).T + bias, in the type of `x`. `parts` are tensors whose first axis is that of the
    outputs: codes, scales and minima, as far as there are such."""
    outs = next(len(part) for part in parts if part is not None)
    out, step = x.new_empty(len(x), outs), max(1, BLOCK_VALUES // max(1, x.shape[1]))

    def multiply(start: int) -> None:
        rows = slice(start, start + step)
        block = numbers(*(None if part is None else part[rows] for part in parts)).to(x.dtype)
        out[:, rows] = F.linear(x, block, None if bias is None else bias[rows])

    starts = range(0, outs, step)
    plain = torch.compiler.is_compiling() or torch.is_grad_enabled() or x.device.type != "cpu" or len(starts) < 2
    list((map if plain else in_threads)(multiply, starts))
    return out


def linear_quantized(
    x: Tensor, weight: Tensor, scales: Tensor, minima: Tensor | None, bias: Tensor | None, format: str
) -> Tensor:
    found = MatrixFormat.named(format)
    return multiply_by_blocks(x, (weight, scales, minima), lambda *parts: dequantize_matrix(found, *parts), bias)
