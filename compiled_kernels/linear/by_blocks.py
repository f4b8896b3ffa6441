"""Compute products in plain torch with a matrix that is quantized, or whose type differs from that of x: some rows of
the matrix at a time are converted to the type of x, never the whole matrix. On eager a product runs these functions; on
inductor they are opaque operators of a graph (see operators.py)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_kernels.linear.matrix_format import MatrixFormat
from compiled_kernels.linear.quantize import dequantize_matrix
from compiled_kernels.threads import in_threads

BLOCK_VALUES = 1 << 18  # numbers of a block: they and their codes stay in a core's cache
GPU_BLOCK_VALUES = 1 << 24  # there a block costs some launches, and its numbers leave the cache either way


def by_blocks(x: Tensor, parts: tuple[Tensor | None, ...], multiply: Callable[..., Tensor]) -> Tensor:
    """Return `multiply(*parts)` [token, out] in the type of `x`, computed for a block of output columns at a time.
    `parts` are the matrix's codes, scales and minima and the bias, or None, each with the output columns as first axis.
    """
    outs = next(len(part) for part in parts if part is not None)
    values = BLOCK_VALUES if x.device.type == "cpu" else GPU_BLOCK_VALUES
    out, step = x.new_empty(len(x), outs), max(1, values // max(1, x.shape[1]))

    def multiply_from(start: int) -> None:
        rows = slice(start, start + step)
        out[:, rows] = multiply(*(None if part is None else part[rows] for part in parts))

    starts = range(0, outs, step)
    plain = torch.compiler.is_compiling() or torch.is_grad_enabled() or x.device.type != "cpu" or len(starts) < 2
    list((map if plain else in_threads)(multiply_from, starts))
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return by_blocks(x, (weight, bias), lambda weight, bias: F.linear(x, weight.to(x.dtype), bias))


def linear_stored(x: Tensor, format: MatrixFormat, matrix: tuple[Tensor | None, ...], bias: Tensor | None) -> Tensor:
    """Multiply x by a quantized matrix, given as its codes, scales and minima."""

    def multiply(*parts: Tensor) -> Tensor:
        *stored, shift = parts
        return F.linear(x, dequantize_matrix(format, *stored).to(x.dtype), shift)

    return by_blocks(x, (*matrix, bias), multiply)
