"""INT4 by token: four bits a number with a scale and a minimum for each token and head, as it is written.

The plain baseline of the formats, as Zhao et al., 2023, "Atom: Low-bit Quantization for Efficient and Accurate LLM
Serving", round their cache, asymmetric and by head:

    code = round((x - min) / scale),    scale = (max - min) / 15        over the numbers of one token and head
    x'   = min + scale * code

Scale and minimum are float16 and are counted: 4 bits and 32 more for each head of a token.
"""

from __future__ import annotations

import torch

from workbench.parts import affine_codes, affine_numbers, pack_bits, unpack_bits


class Int4:
    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        codes, scales, minima = affine_codes(rows, 4)
        return pack_bits(codes, 4), scales, minima

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor) -> torch.Tensor:
        return affine_numbers(unpack_bits(codes, 4), scales, minima)
