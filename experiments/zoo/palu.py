"""Palu: keys and values as their coordinates in a basis of fewer dimensions, found by a singular value decomposition.

Chang et al., 2024, "Palu: Compressing KV-Cache with Low-Rank Projection", section 3:

    X ~ U S V'  of a layer's keys (values) over a calibration text,    B = the first r columns of V
    stored = x B,    x' = (x B) B'                x: all heads of a group of `heads` heads, side by side

The paper decomposes the projections' weights, B' then lies in the weight matrix of the product that follows, and keys
are projected before rotary. Here the basis is that of the keys as they are cached, rotary included, which is harder to
compress, and rows are decoded. `rank` is the share of dimensions that stays. The paper chooses it by layer; with
`cache.layers` so can you. Coordinates are stored in float16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workbench.parts import CodecPair, project


class LowRank:
    def __init__(self, sample: torch.Tensor, heads: int, rank: float):
        rows = self.grouped(sample, heads).transpose(0, 1)  # [group, token, heads * head_dim]
        basis = torch.linalg.eigh((rows.mT @ rows).double()).eigenvectors.flip(-1)  # the largest first
        self.heads, self.basis = heads, basis[..., : max(1, round(rank * basis.shape[-1]))].float()

    @staticmethod
    def grouped(rows: torch.Tensor, heads: int) -> torch.Tensor:
        return rows.unflatten(1, (-1, heads)).flatten(2)

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = self.grouped(rows.float(), self.heads)
        found = [project(rows[:, group], basis) for group, basis in enumerate(self.basis)]
        return (torch.stack(found, 1).clamp(-6e4, 6e4).half(),)  # [token, group, rank]

    def decode(self, coordinates: torch.Tensor) -> torch.Tensor:
        found = [project(coordinates[:, g].float(), basis.mT) for g, basis in enumerate(self.basis)]
        return torch.stack(found, 1).unflatten(-1, (self.heads, -1)).flatten(1, 2)


@dataclass(frozen=True)
class Palu:
    rank: float = 0.5
    heads: int = 1

    def calibrate(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> CodecPair:
        return CodecPair(LowRank(keys, self.heads, self.rank), LowRank(values, self.heads, self.rank))
