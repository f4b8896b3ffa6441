"""Store parameters dense or quantized, one block of rows at a time, so that only one block exists in another format at
once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from compiled_kernels.linear.matrix_format import MatrixFormat
from compiled_kernels.linear.quantize import quantize_matrix
from compiled_kernels.memory import zero_pages

BLOCK_VALUES = 1 << 16  # numbers of a block: small enough for a core's cache, large enough to hide the cost of calls


def row_blocks(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor's rows in order, in blocks."""
    yield from tensor.split(max(1, BLOCK_VALUES // max(1, tensor[0].numel())) if len(tensor) else 1)


def whole_rows(pieces: Iterable[Tensor], shape: tuple[int, ...]) -> Iterator[Tensor]:
    """Regroup the flat pieces of a parameter of `shape` into blocks of whole rows."""
    columns, rest = math.prod(shape[1:]), None
    for piece in pieces:
        rest = piece if rest is None or not len(rest) else torch.cat([rest, piece])
        size = len(rest) // columns * columns
        yield rest[:size].view(-1, *shape[1:])
        rest = rest[size:]


def store_dense(shape: tuple[int, ...], dtype: torch.dtype, blocks: Iterable[Tensor]) -> Tensor:
    """Store a parameter of `shape` as `dtype`; `blocks` yields its rows in order, in any shape."""
    (whole,) = _joined([((math.prod(shape),), dtype)], ((block.flatten(),) for block in blocks))
    return whole.view(shape)


def store_quantized(shape: tuple[int, ...], format: MatrixFormat, blocks: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Quantize a matrix [row, column], or a stack of matrices, from blocks of rows; return codes, scales, and minima if
    the format has them.
    """
    *outer, columns = shape
    rows = (quantize_matrix(block.reshape(-1, columns), format) for block in blocks)
    stored = _joined(format.storage(math.prod(outer), columns).values(), rows)
    return tuple(part.unflatten(0, outer) for part in stored)


def _joined(storage: Iterable[Any], blocks: Iterable[Any]) -> tuple[Tensor, ...]:
    """Store tensors of these shapes and types from blocks of rows."""
    stored, start = tuple(zero_pages(*each) for each in storage), 0
    for block in blocks:
        for whole, part in zip(stored, block, strict=True):
            whole[start : start + len(part)] = part
        start += len(block[0])
    return stored
