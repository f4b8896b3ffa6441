"""Quantize matrices to formats in words of 32 bits (see matrix_format.WORDS), and convert them back to numbers.

Numbers equal those of the `gguf` package bit for bit: `(scale * sub-scale) * code - minimum * sub-minimum`. MXFP4
follows OCP Microscaling Formats v1.0, sections 5.3 and 5.4, without its NaN.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int32, UInt8
from torch import Tensor

from compiled_kernels.linear.matrix_format import WordLayout
from compiled_kernels.linear.planes import pack_planes, pack_sub_scales, unpack_planes, unpack_sub_scales


def codes_of_words(
    words: WordLayout, weight: Int32[Tensor, "out word"], scales: Float[Tensor, "out group"], minima: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return three tensors whose numbers give the matrix, number = code * factor + summand: the codes as numbers [out,
    width], and the factor and summand of each group of columns [out, group]. They are float32, or float64 if the scales
    are."""
    exact = torch.promote_types(scales.dtype, torch.float32)
    blocks = weight.unflatten(-1, (-1, words.words))
    codes = unpack_planes(blocks[..., : words.plane_words], words.planes)
    codes = (codes if words.sign_bit else codes - words.offset).view(torch.int8)  # already two's complement
    numbers = torch.tensor(words.values, device=weight.device)[codes.int()] if words.values else codes
    scales = powers_of_two(scales) if words.exponents else scales
    step, minimum = (
        None if each is None else each.to(exact).unflatten(-1, (blocks.shape[1], -1)) for each in (scales, minima)
    )
    assert step is not None
    if (sub := words.sub_scales) is not None:
        sub_words, groups = blocks[..., words.plane_words :], words.block // words.group
        step = step * ((unpack_sub_scales(sub_words, sub.scale, groups) ^ sub.sign_bit) - sub.offset).to(exact)
        minimum = None if minimum is None else -minimum * unpack_sub_scales(sub_words, sub.minimum, groups).to(exact)
    return numbers.flatten(1), step.flatten(1), None if minimum is None else minimum.flatten(1)


def powers_of_two(exponents: UInt8[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return 2^(exponent - 128) in float32; for exponents 0 and 1 the result is subnormal."""
    wide = exponents.int()
    return torch.where(wide < 2, wide + 1 << 21, wide - 1 << 23).view(torch.float32)


def quantize_words(weight: Float[Tensor, "out width"], words: WordLayout) -> tuple[Tensor, ...]:
    """Quantize a weight to words, scales, and minima if the format has them. Codes span each group from its smallest to
    its largest number (without minima: up to its largest absolute number); codes are the nearest ones, and scales are
    rounded to their types."""
    grouped = weight.float().unflatten(-1, (-1, words.block // words.group, words.group))  # [out, block, group, column]
    values = torch.tensor(words.values or range(-words.offset, (1 << words.bits) - words.offset), dtype=torch.float32)
    values, code_of = values.sort(stable=True)
    low, high = grouped.amin(-1), grouped.amax(-1)
    if (sub := words.sub_scales) is None:
        step = (high - low if words.minima else torch.maximum(-low, high)) / values[-1]
        scales = (step.log2().ceil() + 128).clamp(0, 255).to(torch.uint8) if words.exponents else step.half()
        minima, sub_words = low.half(), None
        step, minimum = powers_of_two(scales) if words.exponents else scales.float(), minima.float()
    else:
        low = low.clamp(max=0)
        step = (high - low if words.minima else torch.maximum(-low, high)) / values[-1]
        scales, integers = _two_levels(step, sub.largest)
        minima, subtracted = _two_levels(-low, sub.largest)
        sub_words = pack_sub_scales((integers + sub.offset) ^ sub.sign_bit, subtracted if words.minima else None, sub)
        step, minimum = scales.float() * integers, -minima.float() * subtracted
    away = grouped - minimum[..., None] if words.minima else grouped
    away = torch.where(step[..., None] == 0, 0.0, away / step[..., None])
    middles = (values[1:] + values[:-1]) / 2
    codes = (code_of.int()[torch.bucketize(away, middles)] ^ words.sign_bit).flatten(-2)
    packed = pack_planes(codes, words.planes)
    packed = packed if sub_words is None else torch.cat([packed, sub_words], -1)
    return tuple(each.flatten(1) for each in ((packed, scales, minima) if words.minima else (packed, scales)))


def _two_levels(numbers: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """Return float16 scales [..., 1] and integers [..., group] up to `largest` with products close to `numbers`."""
    scales = (numbers.amax(-1, keepdim=True) / largest).half()
    return scales, torch.where(scales == 0, 0.0, numbers / scales.float()).round().clamp(0, largest).int()
