"""KVQuant: four bits a number on a grid learned from a sample, keys scaled by channel, values by token.

Hooper et al., 2024, "KVQuant: Towards 10 Million Context Length LLM Inference with KV Cache Quantization", section 3:

    keys:    x = (k - z_c) / s_c,    z_c, s_c: middle and half range of channel c over a calibration text
    values:  x = (v - z_t) / s_t,    of each token and head
    grid:    q_1 .. q_16 = k-means centres of the sample's x, weighed here alike    (the paper weighs by sensitivity)
    code = argmin_i |x - q_i|,    x' = s q_code + z

Keys store codes alone: their scales are measured before. A number beyond the sample's range becomes its end. The paper
quantizes keys before rotary and keeps 1 % of the numbers, outliers, in full precision; neither is done here.
"""

from __future__ import annotations

import torch

from workbench.parts import CodecPair, nearest_levels, pack_bits, unpack_bits


def learned_levels(numbers: torch.Tensor, rounds: int = 30) -> torch.Tensor:
    """Return 16 centres of numbers in -1..1 by Lloyd's k-means, which from even quantiles on is the same always."""
    numbers = numbers.flatten().sort().values
    levels = numbers[torch.linspace(0, len(numbers) - 1, 16).round().long().to(numbers.device)].contiguous()
    for _ in range(rounds):
        nearest = nearest_levels(numbers, levels).long()
        count = torch.bincount(nearest, minlength=16)
        total = torch.zeros(16, dtype=torch.float64, device=numbers.device).index_add_(0, nearest, numbers.double())
        levels = torch.where(count > 0, (total / count.clamp_min(1)).float(), levels)
    return levels


class Keys:
    def __init__(self, sample: torch.Tensor):
        lowest, highest = sample.amin(0), sample.amax(0)  # [kv_head, head_dim]
        self.middles, self.scales = (highest + lowest) / 2, ((highest - lowest) / 2).clamp_min(1e-6)
        self.levels = learned_levels((sample - self.middles) / self.scales)

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (pack_bits(nearest_levels((rows.float() - self.middles) / self.scales, self.levels), 4),)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        return self.levels[unpack_bits(codes, 4).long()] * self.scales + self.middles


class Values:
    def __init__(self, sample: torch.Tensor):
        middles, scales = self.ranges(sample)
        self.levels = learned_levels((sample - middles.float()) / scales.float())

    @staticmethod
    def ranges(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        lowest, highest = rows.float().clamp(-3e4, 3e4).aminmax(dim=-1, keepdim=True)
        return ((highest + lowest) / 2).half(), ((highest - lowest) / 2).clamp_min(1e-4).half()

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        middles, scales = self.ranges(rows)
        codes = nearest_levels((rows.float() - middles.float()) / scales.float(), self.levels)
        return pack_bits(codes, 4), middles, scales

    def decode(self, codes: torch.Tensor, middles: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return self.levels[unpack_bits(codes, 4).long()] * scales.float() + middles.float()


class KvQuant:
    def calibrate(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> CodecPair:
        return CodecPair(Keys(keys), Values(values))
