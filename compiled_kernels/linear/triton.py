"""Multiply by weight matrices in Triton, with the option of batch invariance; by default the GPU vendor's library
computes dense products.

One row is multiplied and summed while the weights stream past it. More rows go through the tensor cores, with the
weights as the left operand: they are converted in registers and never stored as numbers in memory.

    out.T [out, token]  =  weights [out, width]  @  x.T [width, token]

Where a product has too few tiles to fill the device, its width is split and `add_parts` sums the parts.

A plan that is `batch_invariant` has one tile for any number of rows and no split along the width, so a row's bits do
not depend on the batch composition. Dense weights then go through the kernel of quantized ones, their values times a
scale of one, so that no library chooses.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_kernels.backends import BackendError
from compiled_kernels.linear import by_blocks
from compiled_kernels.linear.matrix_format import MatrixFormat, WordLayout
from compiled_kernels.linear.triton_kernels import add_parts, one_row, one_row_grouped, product
from compiled_kernels.linear.triton_words import one_row_words
from compiled_kernels.triton_code.launch import (
    KernelLaunch,
    ceil_div,
    check,
    floor_power_of_two,
    num_processors,
    power_of_two,
    run,
)

ROW_COLUMNS = 8192  # columns of weights, of all its rows, that a program has under way in the one-row kernels
# Number of programs per processor from which a program takes twice the rows, so that x is read half as often.
PROGRAMS_FOR_WIDE_TILES = 4 * 8
MEMORY_BOUND_ROWS = 32  # rows up to which a product waits for memory
MIN_DOT_SIZE = 16
NUMBERS_PER_PROGRAM = 1024  # numbers a program of `add_parts`
INVARIANT_TILE = (64, 64, 64, 4)  # outputs, tokens, columns of a step, warps
INVARIANT_FLOAT32_TILE = (32, 32, 16, 4)  # float32 has no tensor cores here, and its tiles must fit the registers


class StoredWeights(NamedTuple):
    """A matrix as it is passed to the kernels: bytes, words or dense numbers [out, ...], scales, minima, the number of
    columns that share a scale (0: a whole row), and the format of words other than INT4 in groups."""

    codes: Tensor
    scales: Tensor
    minima: Tensor | None = None
    group: int = 0
    format: WordLayout | None = None

    @property
    def has_four_bits(self) -> bool:
        return self.codes.dtype == torch.int32 and self.format is None

    @property
    def is_fp8(self) -> bool:
        return self.codes.dtype == torch.float8_e4m3fn

    @property
    def loaded(self) -> Tensor:
        """Return the codes in the type that kernels load: E4M3 numbers as bytes."""
        return (self.codes.view(torch.uint8) if self.is_fp8 else self.codes).contiguous()

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the kernel `product` that describe the matrix."""
        return {
            "weights": self.loaded, "scales": self.scales,
            "minima": self.scales if self.minima is None else self.minima,
            "GROUP": self.group, "FOUR": self.has_four_bits, "FP8": self.is_fp8, "MINIMA": self.minima is not None,
            "FORMAT": self.format,
        }  # fmt: skip


def plan(
    x: Tensor, weight: Tensor, scales: Tensor | None, minima: Tensor | None, bias: Tensor | None, codes: str,
    group: int, activations: str = "float", splits: int | None = None, batch_invariant: bool = False,
) -> tuple[list[KernelLaunch], Tensor]:  # fmt: skip
    """Plan the kernel launches for the product of x and a quantized matrix, or with `batch_invariant` a matrix in any
    format. The width is split into `splits` parts. Return the launches and the output that they fill.
    """
    check("linear_quantized", x, scales, minima, bias)
    weights = _stored(x, MatrixFormat.of(codes, group, scales, minima), weight, scales, minima)
    x = x if x.stride(1) == 1 else x.contiguous()
    (tokens, width), outs, group = x.shape, weights.codes.shape[0], weights.group
    out = x.new_empty(tokens, outs)
    arguments = {"x": x, "bias": x if bias is None else bias, "out": out, "width": width, "outs": outs}
    arguments["BIAS"] = bias is not None
    if batch_invariant:
        tile = INVARIANT_TILE if x.dtype.itemsize == 2 else INVARIANT_FLOAT32_TILE
        return _products(arguments, weights, 1, tile), out
    if tokens > 1 or splits:
        return _products(arguments, weights, splits), out
    rows = _rows(outs, x.device)
    grid, columns = (ceil_div(outs, rows),), min(ROW_COLUMNS // rows, power_of_two(width))
    if weights.format is not None:
        arguments |= {"OUTS": rows, "COLUMNS": columns, **weights.arguments, "EVEN": width % columns == 0}
        return [KernelLaunch(one_row_words, grid, arguments)], out
    if not group:
        arguments |= {"values": weights.loaded, "scales": weights.scales, "FP8": weights.is_fp8}
        arguments |= {"OUTS": rows, "COLUMNS": columns, "EVEN": width % columns == 0}
        return [KernelLaunch(one_row, grid, arguments)], out
    groups = weights.scales.shape[1]
    together = max(1, min(ROW_COLUMNS // rows // group, power_of_two(groups)))
    arguments |= {"groups": groups, "OUTS": rows, "GROUPS": together}
    arguments |= {**weights.arguments, "EVEN": width % (together * group) == 0}
    return [KernelLaunch(one_row_grouped, grid, arguments)], out


def _stored(
    x: Tensor, format: MatrixFormat, codes: Tensor, scales: Tensor | None, minima: Tensor | None
) -> StoredWeights:
    width, group, four = x.shape[1], format.group, format.codes == "int4"
    if problem := format.problem(width):
        raise BackendError(f"linear_quantized: {problem} {width} columns")
    if scales is None:
        return StoredWeights(codes, torch.ones(len(codes), device=x.device))
    if not four and format.words is None and group >= width:
        if minima is None:
            return StoredWeights(codes, scales[:, 0].contiguous())
        group = power_of_two(group)
    if group and group != power_of_two(group, least := 8 if four else 1):
        known = f"groups of a power of two columns, {least} or more"
        raise BackendError(f"linear_quantized: backend triton supports {known}, not {group}")
    scales, minima = scales.contiguous(), None if minima is None else minima.contiguous()
    return StoredWeights(codes, scales, minima, group, format.words)


def _rows(outs: int, device: torch.device) -> int:
    """Return the rows of weights that a program of the one-row kernels takes."""
    return 8 if outs >= 8 * PROGRAMS_FOR_WIDE_TILES * num_processors(device) else 4


def _products(
    arguments: dict[str, Any], weights: StoredWeights, splits: int | None, tile: tuple[int, int, int, int] | None = None
) -> list[KernelLaunch]:
    x, out, outs = arguments["x"], arguments["out"], arguments["outs"]
    tokens, width = x.shape
    few, narrow = tokens <= MEMORY_BOUND_ROWS, x.dtype.itemsize == 2
    # Few rows: small tiles of long reads. Many: two warp groups of 64 outputs by up to 128 rows. float32 has no tensor
    # cores here, and its tiles must fit the registers of plain arithmetic.
    tensor_cores = (64, MEMORY_BOUND_ROWS, 128, 4) if few else (128, 128, 64, 8)
    block_outs, block_tokens, size, warps = tensor_cores if narrow else (32, MEMORY_BOUND_ROWS, 16, 4)
    block_tokens = min(block_tokens, power_of_two(tokens, MIN_DOT_SIZE))
    if tile is not None:
        block_outs, block_tokens, size, warps = tile
    size = max(weights.group, MIN_DOT_SIZE, min(size, power_of_two(width)), 32 if weights.format else 0)
    steps = ceil_div(width, size)
    tiles = ceil_div(tokens, block_tokens) * ceil_div(outs, block_outs)
    wanted = 2 * num_processors(x.device) if few else num_processors(x.device)
    parts = splits or min(8, floor_power_of_two(wanted // tiles), floor_power_of_two(steps // 4))
    each = ceil_div(steps, parts)
    split = parts > 1
    numbers = tokens * outs
    arguments |= {
        "tokens": tokens, "x_stride": x.stride(0), "steps": each,
        "parts": x.new_empty((parts, numbers), dtype=torch.float32) if split else out,
        "OUTS": block_outs, "TOKENS": block_tokens, "COLUMNS": size, "EVEN": width % (size * parts) == 0,
        "SPLIT": split, **weights.arguments,
    }  # fmt: skip
    grid = (ceil_div(tokens, block_tokens), ceil_div(outs, block_outs), parts)
    found = [KernelLaunch(product, grid, arguments, num_warps=warps, num_stages=4)]
    if split:
        shared = {name: arguments[name] for name in ("parts", "bias", "out", "outs", "BIAS")}
        block = max(1, NUMBERS_PER_PROGRAM // power_of_two(parts))
        shared |= {"numbers": numbers, "splits": parts, "SPLITS": power_of_two(parts), "NUMBERS": block}
        found.append(KernelLaunch(add_parts, (ceil_div(numbers, block),), shared))
    return found


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute the product with the GPU vendor's library, cuBLAS; there is no dense Triton kernel. Under Triton's
    interpreter the CPU computes the product."""
    check("linear", x, weight, bias)
    return F.linear(x, weight, bias) if weight.dtype == x.dtype else by_blocks.linear(x, weight, bias)


def linear_quantized(
    x: Tensor, weight: Tensor, scales: Tensor, minima: Tensor | None, bias: Tensor | None, codes: str, group: int,
    activations: str,
) -> Tensor:  # fmt: skip
    if activations != "float":
        raise BackendError("linear_quantized: backend triton multiplies activations in float, not in INT8")
    return run(*plan(x, weight, scales, minima, bias, codes, group))
