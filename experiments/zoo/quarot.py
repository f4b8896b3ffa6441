"""QuaRot: rotate each head by a Hadamard matrix before four-bit quantization, so that no channel stands out.

Ashkboos et al., 2024, "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", section 4 (keys and values):

    q . k  =  (H q) . (H k),    H H = I        (Sylvester's Hadamard matrix / sqrt(head_dim))
    stored =  int4(H k),        k' = H int4^-1(stored)

A rotation spreads an outlier of one channel over all of them, and the range that a scale must cover shrinks. The paper
rotates queries and keys after rotary, and values through the weights; here a row is rotated back as it is decoded,
which gives the same numbers. Codes are asymmetric, with a scale and a minimum for each token and head.
"""

from __future__ import annotations

import torch

from workbench.parts import affine_codes, affine_numbers, hadamard_rotate, pack_bits, unpack_bits


class QuaRot:
    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        codes, scales, minima = affine_codes(hadamard_rotate(rows), 4)
        return pack_bits(codes, 4), scales, minima

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor) -> torch.Tensor:
        return hadamard_rotate(affine_numbers(unpack_bits(codes, 4), scales, minima))
