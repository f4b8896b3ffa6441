"""NF4: four bits a number on a grid of normal quantiles, scaled to the largest of a block of columns.

Dettmers et al., 2023, "QLoRA: Efficient Finetuning of Quantized LLMs", equation 4 (there of weights):

    q_i  = (Q(i / 18) + Q((i + 1) / 18)) / 2 of N(0, 1), divided by the largest       for i = 1 ... 16
    code = argmin_i |x / absmax - q_i|,    x' = absmax * q_code

Here keys and values of one token and head are cut into blocks of `block` columns with a float16 maximum each, and the
grid is symmetric (the paper's has an exact zero and one level more on one side), with eighteenths where the paper has
2^4 + 1 = 17 from i = 0, of which Q(0) is infinite.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workbench.parts import nearest_levels, pack_bits, unpack_bits


@dataclass(frozen=True)
class NormalFloat:
    block: int = 32

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        blocks = rows.float().unflatten(-1, (-1, min(self.block, rows.shape[-1])))
        scales = blocks.abs().amax(-1, keepdim=True).clamp(1e-4, 6e4).half()
        codes = nearest_levels(blocks / scales.float(), self.levels(rows.device))
        return pack_bits(codes.flatten(-2), 4), scales.squeeze(-1)

    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        numbers = self.levels(codes.device)[unpack_bits(codes, 4).long()]
        return (numbers.unflatten(-1, (scales.shape[-1], -1)) * scales.float()[..., None]).flatten(-2)

    @staticmethod
    def levels(device: torch.device) -> torch.Tensor:
        ends = torch.special.ndtri(torch.arange(1, 18, device=device) / 18)
        middles = (ends[1:] + ends[:-1]) / 2
        return middles / middles[-1]
