"""FP8 by head: one byte a number in E4M3, with one scale for each layer and head, measured before.

Micikevicius et al., 2022, "FP8 Formats for Deep Learning", section 3; engines keep caches like this:

    s_h  =  max over a sample of |x_h| / 448        x_h: all keys (or all values) of head h
    code =  e4m3(x / s_h),    x' = s_h code          numbers beyond the sample's largest become +-448

A token stores its codes and nothing else; the scales are as many as there are heads. The format has an exponent of its
own for each number, so a scale too large costs nothing until numbers fall below 2^-9 of it.
"""

from __future__ import annotations

import torch

from workbench.parts import CodecPair

LARGEST = torch.finfo(torch.float8_e4m3fn).max


class ScaledFp8:
    def __init__(self, sample: torch.Tensor):
        self.scales = (sample.abs().amax((0, 2)) / LARGEST).clamp_min(1e-8)[:, None]  # [kv_head, 1]

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        codes = (rows.float() / self.scales).clamp(-LARGEST, LARGEST)
        return (codes.to(torch.float8_e4m3fn).view(torch.uint8),)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        return codes.view(torch.float8_e4m3fn).float() * self.scales


class Fp8ByHead:
    def calibrate(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> CodecPair:
        return CodecPair(ScaledFp8(keys), ScaledFp8(values))
