"""SKVQ: two bits, channels of like ranges together, ranges clipped, and a window of new tokens in full precision.

Duanmu et al., 2024, "SKVQ: Sliding-window Key and Value Cache Quantization for Large Language Models", section 3:

    x_g  =  the `columns` channels of group g, of channels sorted by their range over a calibration text
    code =  clamp(round((x_g - a min x_g) / s), 0, 2^B - 1),    s = (a max x_g - a min x_g) / (2^B - 1)
    a:      the share of the range, of a few, with the least error on the calibration text, by group

A token is encoded once it has left the window of `cache.residual_length` tokens; the first tokens can stay exact
(`cache.num_sink_tokens`). The paper clusters channels by k-means and has 2 bits for keys, 1.5 for values; here they are
sorted, with 2 bits for both. Scales and minima are float16.
"""

from __future__ import annotations

import torch

from workbench.parts import CodecPair, affine_codes, affine_numbers, pack_bits, unpack_bits

SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6)


class Clipped:
    def __init__(self, sample: torch.Tensor, bits: int, columns: int):
        self.bits, self.columns = bits, min(columns, sample.shape[-1])
        self.order = (sample.amax(0) - sample.amin(0)).argsort(dim=-1, stable=True)  # [kv_head, head_dim]
        self.back = self.order.argsort(-1)
        runs = self.runs(sample)  # [token, kv_head, run, column]
        errors = [(self.rounded(runs, share) - runs).square().sum((0, 3)) for share in torch.tensor(SHARES)]
        self.share = torch.tensor(SHARES, device=sample.device)[torch.stack(errors).argmin(0)][..., None]

    def runs(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.float().gather(-1, self.order.expand_as(rows)).unflatten(-1, (-1, self.columns))

    def codes(self, runs: torch.Tensor, share: torch.Tensor) -> tuple[torch.Tensor, ...]:
        low, high = (share * end for end in runs.aminmax(dim=-1, keepdim=True))
        return affine_codes(runs.clamp(low, high), self.bits)

    def rounded(self, runs: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        codes, scales, minima = self.codes(runs, share)
        return affine_numbers(codes, scales, minima)

    def encode(self, blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        codes, scales, minima = self.codes(self.runs(blocks), self.share)  # [block, 1, kv_head, run, column]
        return pack_bits(codes.flatten(-2), self.bits), scales, minima

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor) -> torch.Tensor:
        runs = unpack_bits(codes, self.bits).unflatten(-1, (-1, self.columns))
        rows = affine_numbers(runs, scales, minima).flatten(-2)
        return rows.gather(-1, self.back.expand_as(rows))


class Skvq:
    group = 1  # each token by itself, once it is old

    def __init__(self, bits: int = 2, columns: int = 32):
        self.bits, self.columns = bits, columns

    def calibrate(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> CodecPair:
        given = self.bits, self.columns
        return CodecPair(Clipped(keys, *given), Clipped(values, *given), group=1)
