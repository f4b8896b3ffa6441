"""The product in torch's own operations, as the backend eager runs it and torch.compile takes it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_kernels.linear_w8a8.quantize import quantize_rows

COLUMNS = 1024  # of INT8 products, each at most 127 x 128, that sum to no more than float32 holds exactly: 2^24


def linear_w8a8(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Float32 products of `COLUMNS` columns are exact whatever the order of their sums, so a library may make them;
    their sums are joined as integers."""
    rows, row_scales = quantize_rows(x)
    parts = zip(rows.split(COLUMNS, dim=1), values.split(COLUMNS, dim=1), strict=True)
    sums = sum((F.linear(row.float(), value.float()).to(torch.int32) for row, value in parts), start=torch.tensor(0))
    out = sums.to(row_scales.dtype) * row_scales[:, None] * scales.to(row_scales.dtype)
    return (out if bias is None else out + bias.to(out.dtype)).to(x.dtype)
