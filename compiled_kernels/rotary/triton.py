"""Compute rotary embedding in Triton with one program for a token and a few heads: the angles are read once for all of
these heads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_kernels.triton_code.launch import KernelLaunch, ceil_div, check, power_of_two, run

PAIRS = 1024  # maximum pairs of a program


@triton.jit
def turn(
    x, cos, sin, out, heads, half, x_token, x_head, x_dim, cos_token, cos_half, sin_token, sin_half,
    HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    pair = tl.arange(0, HALF)[None, :]
    inside = (head < heads) & (pair < half)
    c = tl.load(cos + token * cos_token + pair * cos_half, mask=pair < half, other=0.0).to(tl.float32)
    s = tl.load(sin + token * sin_token + pair * sin_half, mask=pair < half, other=0.0).to(tl.float32)
    first_at = x + token * x_token + head * x_head + pair * x_dim
    first = tl.load(first_at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(first_at + half * x_dim, mask=inside, other=0.0).to(tl.float32)
    at = out + (token * heads + head) * 2 * half + pair
    tl.store(at, first * c - second * s, mask=inside)
    tl.store(at + half, second * c + first * s, mask=inside)


def plan(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[list[KernelLaunch], Tensor]:
    check("rotary", x, cos, sin)
    tokens, heads, dim = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    pairs = power_of_two(dim // 2)
    together = min(power_of_two(heads), max(1, PAIRS // pairs))
    arguments = {
        "x": x, "cos": cos, "sin": sin, "out": out, "heads": heads, "half": dim // 2,
        "x_token": x.stride(0), "x_head": x.stride(1), "x_dim": x.stride(2),
        "cos_token": cos.stride(0), "cos_half": cos.stride(1), "sin_token": sin.stride(0), "sin_half": sin.stride(1),
        "HEADS": together, "HALF": pairs,
    }  # fmt: skip
    return [KernelLaunch(turn, (tokens, ceil_div(heads, together)), arguments)], out


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return run(*plan(x, cos, sin))
