"""Activations as INT8, one scale a row, symmetric: the rule that every backend follows bit for bit."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int8
from torch import Tensor

MAX_EXACT_COLUMNS = 1 << 17  # columns whose products of two INT8 values, -128 among them, an int32 can sum


def quantize_rows(x: Float[Tensor, "token width"]) -> tuple[Int8[Tensor, "token width"], Float[Tensor, " token"]]:
    """Return values in -127..127, rounded half to even, and scales of amax / 127 (float64 where `x` is that, float32
    otherwise), the smallest normal float32 at least: a row of zeros has values of zero.

    A row that holds a number that is not finite has a scale that is not, so nothing finite comes of it."""
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    scales = (exact.abs().amax(dim=-1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    return (exact / scales[:, None]).round().clamp(-127, 127).to(torch.int8), scales
