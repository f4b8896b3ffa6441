"""Rotary embedding through torch-mlir. Heads are read where a fused projection left them."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_kernels.mlir.leaf import Leaf
from compiled_kernels.rotary.reference import reference

ROTARY = Leaf("rotary", reference)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    ROTARY.prepare((x, cos, sin))((x, cos, sin), (out,))
    return out
