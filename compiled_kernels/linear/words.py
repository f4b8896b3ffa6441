"""Matrices in words of 32 bits (see matrix_format.WORDS): quantized, and as numbers again.

Numbers are those of the `gguf` package to the last bit: `(scale * sub-scale) * code - minimum * sub-minimum`. MXFP4 is
that of OCP Microscaling Formats v1.0, sections 5.3 and 5.4, without its NaN.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int8, Int32, UInt8
from torch import Tensor

from compiled_kernels.linear.matrix_format import WordLayout
from compiled_kernels.linear.planes import pack_planes, pack_sub_scales, unpack_planes, unpack_sub_scales


def codes_of_words(
    words: WordLayout, weight: Int32[Tensor, "out word"], scales: Float[Tensor, "out group"], minima: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the numbers that a matrix's codes mean [out, width], and for each group of columns what multiplies them
    and what is then added [out, group], in float32; in float64 with scales of float64."""
    exact = torch.promote_types(scales.dtype, torch.float32)
    blocks, codes = weight.unflatten(-1, (-1, words.words)), unpack_codes(words, weight)
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
    """Return 2^(exponent - 128) in float32, of which the two least are subnormal."""
    wide = exponents.int()
    return torch.where(wide < 2, wide + 1 << 21, wide - 1 << 23).view(torch.float32)


def unpack_codes(words: WordLayout, weight: Int32[Tensor, "out word"]) -> Int8[Tensor, "out block column"]:
    """Return the integers that codes mean, or their places in the table of values."""
    blocks = weight.unflatten(-1, (-1, words.words))
    codes = unpack_planes(blocks[..., : words.plane_words], words.planes)
    return (codes if words.sign_bit else codes - words.offset).view(torch.int8)  # two's complement is read as it is


def quantize_words(weight: Float[Tensor, "out width"], words: WordLayout) -> tuple[Tensor, ...]:
    """Quantize to words, scales, and minima where there are such: the nearest codes of scales that reach from a group's
    least to its largest number (without minima: to its largest either way), rounded to their types."""
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
    """Return float16 scales [..., 1] and integers [..., group] up to `largest` whose products are near `numbers`."""
    scales = (numbers.amax(-1, keepdim=True) / largest).half()
    return scales, torch.where(scales == 0, 0.0, numbers / scales.float()).round().clamp(0, largest).int()
