"""Batch-invariant products: one tile for any number of rows, and no split along the width, so that a row's bits do not
depend on the batch composition.

Dense weights go through the kernel of quantized ones, their values times a scale of one, so that no library chooses.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_kernels.backends import BackendError
from compiled_kernels.linear.triton import MIN_DOT_SIZE, product
from compiled_kernels.triton_code.launch import KernelLaunch, ceil_div, check, power_of_two

INVARIANT_TILE = (64, 64, 64, 4)  # outputs, tokens, bytes of a step, warps
INVARIANT_FLOAT32_TILE = (32, 32, 16, 4)  # float32 has no tensor cores here, and its tiles must fit the registers


def plan_batch_invariant(x: Tensor, weights: Tensor, scales: Tensor | None, bias: Tensor | None) -> tuple[list[KernelLaunch], Tensor]:
    """Plan x times `weights`: dense without `scales`, INT8 with one a row, INT4 (uint8) with one a group of columns."""
    check("linear", x, scales, bias)
    width, outs, half = x.shape[1], weights.shape[0], 0
    if weights.dtype == torch.uint8 and scales is not None:
        half = weights.shape[1] // scales.shape[1]
        if half != power_of_two(half):
            raise BackendError(f"linear_int4: backend triton knows groups of a power of two columns, not {2 * half}")
    scales = torch.ones(outs, device=x.device) if scales is None else scales.contiguous()
    x, weights = x if x.stride(1) == 1 else x.contiguous(), weights.contiguous()
    out = x.new_empty(x.shape[0], outs)
    block_outs, block_tokens, size, warps = INVARIANT_TILE if x.dtype.itemsize == 2 else INVARIANT_FLOAT32_TILE
    size = max(half, MIN_DOT_SIZE, min(size, power_of_two(weights.shape[1])))
    arguments = {
        "x": x, "weights": weights, "scales": scales, "bias": x if bias is None else bias, "out": out, "parts": out,
        "tokens": x.shape[0], "width": width, "outs": outs, "x_stride": x.stride(0),
        "steps": ceil_div(weights.shape[1], size), "OUTS": block_outs, "TOKENS": block_tokens, "BYTES": size,
        "HALF": half, "EVEN": weights.shape[1] % size == 0, "BIAS": bias is not None, "SPLIT": False,
    }  # fmt: skip
    grid = (ceil_div(x.shape[0], block_tokens), ceil_div(outs, block_outs), 1)
    return [KernelLaunch(product, grid, arguments, num_warps=warps, num_stages=4)], out
