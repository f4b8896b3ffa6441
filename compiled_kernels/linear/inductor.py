"""Compute products of one row with torch.compile as a multiply and a sum, which read each weight once at memory
bandwidth; a library's matrix product reaches about half of it."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_kernels.quantized_attention.quantize import decode_e4m3


def reduces(x: Tensor) -> bool:
    """Return whether a product with `x` is faster as a multiply and a sum than as a library's matrix product."""
    return x.shape[0] == 1 and x.device.type == "cpu"


def linear(x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None) -> Tensor:
    """Multiply x by a dense matrix, or by codes with one scale for each row."""
    exact = torch.promote_types(x.dtype, torch.float32)
    sums = (weight.to(exact) * x.to(exact)).sum(dim=-1)
    return _with_bias((sums if scales is None else sums * scales)[None], bias, x.dtype)


def linear_grouped(
    x: Tensor, codes: Tensor, scales: Tensor, minima: Tensor | None, bias: Tensor | None, group: int
) -> Tensor:
    codes = decode_e4m3(codes, torch.float32) if codes.dtype == torch.float8_e4m3fn else codes
    exact = torch.promote_types(x.dtype, torch.float32)
    row = x[0].to(exact)
    whole = x.shape[1] // group  # groups, before one that has fewer columns
    columns = row[: whole * group].view(whole, group)
    if codes.dtype == torch.int32:
        octets, offset = codes.view(torch.uint8).view(codes.shape[0], whole, -1), 0 if minima is not None else 8
        # The bytes of a word hold columns 0 and 4, 2 and 6, 1 and 5, 3 and 7. `cat` makes x in that order a separate
        # tensor, which Inductor reads in whole vectors; otherwise it would permute x again for each row.
        low, high = torch.cat([*row.view(-1, 2, 2, 2).permute(1, 0, 3, 2).flatten(1)]).view(2, whole, -1)
        sums = ((octets & 15).to(exact) - offset) * low + ((octets >> 4).to(exact) - offset) * high
    else:
        sums = codes[:, : whole * group].view(codes.shape[0], whole, group).to(exact) * columns
    out = (sums * scales[:, :whole, None].to(exact)).sum(dim=(1, 2))
    rest = row[whole * group :]
    if rest.numel():
        out = out + (codes[:, whole * group :].to(exact) * rest).sum(dim=1) * scales[:, whole].to(exact)
    if minima is not None:
        by_group = torch.cat([columns.sum(dim=1), rest.sum(dim=0, keepdim=True)])[: scales.shape[1]]
        out = out + (minima.to(exact) * by_group).sum(dim=1)
    return _with_bias(out[None], bias, x.dtype)


def _with_bias(out: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return (out if bias is None else out + bias.to(out.dtype)).to(dtype)
