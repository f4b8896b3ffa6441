"""KIVI: two bits a number, keys with a scale for each channel of a group of tokens, values with one for each token.

Liu et al., 2024, "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", section 3:

    Q(X) = round((X - z) / s),    z = min X,    s = (max X - min X) / (2^B - 1),    X' = s Q(X) + z
    keys:    min and max over `group` tokens of one channel        (channels of keys have outliers)
    values:  min and max over `columns` numbers of one token       (so that an error stays with its token)

The newest tokens, at least `cache.residual_length` and the incomplete group, stay in full precision. Scales and minima
are float16 and counted. Without a kernel of its own it saves memory here and no time: pages are decoded for each step.
"""

from __future__ import annotations

import torch

from workbench.parts import affine_codes, affine_numbers, pack_bits, unpack_bits


class Keys:
    def __init__(self, bits: int):
        self.bits = bits

    def encode(self, blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        codes, scales, minima = affine_codes(blocks, self.bits, dim=1)  # [block, group, kv_head, head_dim]
        return pack_bits(codes, self.bits), scales, minima

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor) -> torch.Tensor:
        return affine_numbers(unpack_bits(codes, self.bits), scales, minima)


class Values:
    def __init__(self, bits: int, columns: int):
        self.bits, self.columns = bits, columns

    def encode(self, blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        runs = blocks.unflatten(-1, (-1, min(self.columns, blocks.shape[-1])))
        codes, scales, minima = affine_codes(runs, self.bits)
        return pack_bits(codes.flatten(-2), self.bits), scales, minima

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor) -> torch.Tensor:
        runs = unpack_bits(codes, self.bits).unflatten(-1, (scales.shape[-2], -1))
        return affine_numbers(runs, scales, minima).flatten(-2)


class Kivi:
    def __init__(self, bits: int = 2, group: int = 32, columns: int = 32):
        self.group, self.keys, self.values = group, Keys(bits), Values(bits, columns)
