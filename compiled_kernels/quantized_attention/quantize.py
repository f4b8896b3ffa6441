"""Quantization of numbers to codes, each within half a step of its number.

Scale and minimum are float16, the scale rounded up and the minimum down, so that the steps from the stored minimum on
reach every number; codes are then chosen against what is stored. What float16 cannot hold is stored as its largest
number; a run with a NaN or an infinity in it reads as NaN, all of it.
"""

from __future__ import annotations

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from compiled_kernels.quantized_attention.packed import MAX_CODES, QuantFormat, QuantizedTensor, pack_codes

FLOAT16_MAX = torch.finfo(torch.float16).max
E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max


def quantize(numbers: Float[Tensor, "*before summed kept"], kind: QuantFormat, numbers_per_scale: int) -> QuantizedTensor:
    """Quantize `numbers` to a format, with a scale for each `numbers_per_scale` of them along `kept`."""
    if kind == "dense":
        return QuantizedTensor(numbers)
    exact = numbers.to(torch.promote_types(numbers.dtype, torch.float32))
    sound = torch.where(exact.isfinite(), exact.clamp(-FLOAT16_MAX, FLOAT16_MAX), torch.nan)
    runs = rearrange(sound, "... summed (part run) -> ... part summed run", run=numbers_per_scale)
    scales, minima, codes = _fp8(runs) if kind == "fp8" else _integers(runs, MAX_CODES[kind])
    return QuantizedTensor(pack_codes(rearrange(codes, "... part summed run -> ... summed (part run)"), kind), scales, minima)


def _integers(runs: Tensor, levels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize by steps up from the minimum. A constant run that float16 holds has the scale 0 and is exact."""
    lowest, highest = runs.amin(-1), runs.amax(-1)
    minima = _rounded(lowest, up=False)
    scales = _rounded((highest - minima.to(runs.dtype)) / levels, up=True)
    steps = scales.to(runs.dtype)[..., None]
    codes = (runs - minima.to(runs.dtype)[..., None]) / torch.where(steps == 0, 1.0, steps)
    return scales, minima, codes.nan_to_num(0.0).round().clamp(0, levels).to(torch.uint8)


def _fp8(runs: Tensor) -> tuple[Tensor, None, Tensor]:
    """Quantize to FP8: the largest of a run becomes e4m3's largest, 448."""
    scales = _rounded(runs.abs().amax(-1) / E4M3_MAX, up=True)
    steps = scales.to(runs.dtype)[..., None]
    codes = (runs / torch.where(steps == 0, 1.0, steps)).nan_to_num(0.0).clamp(-E4M3_MAX, E4M3_MAX)
    return scales, None, codes.to(torch.float8_e4m3fn).view(torch.uint8)


def _rounded(exact: Tensor, up: bool) -> Tensor:
    """Return float16 numbers not below (or not above) `exact`, and the nearest such."""
    near = exact.half()
    bits = near.view(torch.int16).int()
    ordered = torch.where(bits < 0, -(bits & 0x7FFF), bits)  # neighbours differ by one, on both sides of zero
    ordered = ordered + (1 if up else -1)
    bits = torch.where(ordered < 0, -ordered - 0x8000, ordered).to(torch.int16)
    wide = near.to(exact.dtype)
    return torch.where(wide < exact if up else wide > exact, bits.view(torch.float16), near)
