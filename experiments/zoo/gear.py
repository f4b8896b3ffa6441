"""GEAR: few bits a number, and beside them a low-rank matrix and a few outliers that make up for the error.

Kang et al., 2024, "GEAR: An Efficient KV Cache Compression Recipe for Near-Lossless Generative Inference", equation 1:

    X  ~  D + L + S
    S: the `sparse` share of numbers that are largest, exact        D = quantized(X - S), `bits` bits
    L = A B': rank `rank`, by power iteration on the error X - S - D    (one matrix for each head)

X are `group` tokens of a head. D is as in KIVI: keys have a scale for each channel, values for each token. Here S are
the largest of a group of tokens by magnitude; the paper takes them by channel (keys) and by token (values).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workbench.parts import affine_codes, affine_numbers, pack_bits, project, unpack_bits


@dataclass(frozen=True)
class Side:
    bits: int
    rank: int
    sparse: float
    dim: int  # along which numbers share a scale, of [block, kv_head, token, head_dim]

    def encode(self, blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = blocks.float().clamp(-6e4, 6e4).transpose(1, 2)  # [block, kv_head, token, head_dim]
        flat, count = x.flatten(2), max(1, round(self.sparse * x.shape[2] * x.shape[3]))
        place = flat.abs().argsort(dim=-1, descending=True, stable=True)[..., :count]
        outliers = flat.gather(-1, place).half()
        inside = x.mean(self.dim, keepdim=True).expand_as(x).flatten(2).gather(-1, place)
        rest = flat.scatter(-1, place, inside).view_as(x)
        codes, scales, minima = affine_codes(rest, self.bits, self.dim)
        left, right = self.low_rank(rest - affine_numbers(codes, scales, minima))
        return pack_bits(codes, self.bits), scales, minima, left, right, outliers, place.to(torch.int16)

    def low_rank(self, error: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A [.., token, rank] and B [.., head_dim, rank] by two rounds of power iteration."""
        error = error.double()
        right = torch.eye(error.shape[-1], self.rank, device=error.device).double().expand(*error.shape[:2], -1, -1)
        for _ in range(2):
            left = torch.linalg.qr(project(error, right[:, :, None]) + 1e-12).Q
            right = project(error.mT, left[:, :, None])
        return left.half(), right.half()

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor, left: torch.Tensor,
               right: torch.Tensor, outliers: torch.Tensor, place: torch.Tensor) -> torch.Tensor:  # fmt: skip
        numbers = affine_numbers(unpack_bits(codes, self.bits), scales, minima) + left.float() @ right.float().mT
        whole = numbers.flatten(2).scatter(-1, place.long(), outliers.float()).view_as(numbers)
        return whole.transpose(1, 2)


class Gear:
    def __init__(self, bits: int = 2, rank: int = 2, sparse: float = 0.02, group: int = 32):
        self.group = group
        self.keys, self.values = Side(bits, rank, sparse, dim=2), Side(bits, rank, sparse, dim=3)
