"""Product codes: a head is cut into pieces of a few columns, and each piece stored as the nearest word of a codebook.

Zhang et al., 2024, "PQCache: Product Quantization-based KVCache for Long Context LLM Inference", section 3, after
Jegou et al., 2011, "Product Quantization for Nearest Neighbor Search":

    x = (x_1, .., x_m),    code_i = argmin_j |x_i - w_ij|,    x' = (w_1,code_1, .., w_m,code_m)
    w_i1 .. w_i256: k-means centres of the pieces x_i of a sample, for each head of keys and of values

One byte holds `columns` numbers. PQCache keeps exact keys and values on the CPU and reads codes only to choose tokens;
here the codes are the cache, which is the harder use. Codebooks of 256 words are tables of the layer, not of a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workbench.parts import CodecPair

WORDS = 256


class ProductCodes:
    def __init__(self, sample: torch.Tensor, columns: int, rounds: int):
        pieces = self.pieces(sample, columns).flatten(1, 2).transpose(0, 1)  # [piece, token, column]
        first = torch.linspace(0, pieces.shape[1] - 1, WORDS).round().long().to(pieces.device)
        words = pieces[:, first].clone()
        for _ in range(rounds):
            nearest = (words.square().sum(-1)[:, None] - 2 * pieces @ words.mT).argmin(-1)
            total = torch.zeros_like(words, dtype=torch.float64)
            total.scatter_add_(1, nearest[..., None].expand_as(pieces), pieces.double())
            count = torch.zeros(nearest.shape[0], WORDS, device=words.device)
            count.scatter_add_(1, nearest, torch.ones_like(nearest, dtype=count.dtype))
            words = torch.where(count[..., None] > 0, (total / count[..., None].clamp_min(1)).float(), words)
        self.columns, self.words = columns, words.half().float()  # [piece of every head, word, column]

    @staticmethod
    def pieces(rows: torch.Tensor, columns: int) -> torch.Tensor:
        return rows.float().unflatten(-1, (-1, columns))  # [token, kv_head, piece, column]

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pieces = self.pieces(rows, self.columns)
        away = torch.zeros(*pieces.shape[:3], WORDS, device=rows.device)
        for column in range(self.columns):
            words = self.words[..., column].view(1, *pieces.shape[1:3], WORDS)
            away = away + (pieces[..., column, None] - words).square()
        return (away.argmin(-1).to(torch.uint8),)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        place = torch.arange(len(self.words), device=codes.device).view(codes.shape[1:])
        return self.words[place, codes.long()].flatten(-2)


@dataclass(frozen=True)
class Pq:
    columns: int = 2
    rounds: int = 8

    def calibrate(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> CodecPair:
        given = self.columns, self.rounds
        return CodecPair(ProductCodes(keys, *given), ProductCodes(values, *given))
