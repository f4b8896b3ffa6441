"""Numbers as small codes with a scale (and a minimum) for each run of them, laid out for sums over one axis.

    numbers  [..., summed, kept]      keys: summed = dim, kept = offset       values: summed = offset, kept = dim
    codes    [..., word, kept, 4]     four bytes a word, one after another along `summed`; INT4: eight halves of bytes
    scales   [..., part, summed]      one for each run of kept / part numbers

So keys have a scale a channel and run of tokens, values one a token and run of columns (KIVI, Liu et al. 2024), and
attention sums over the same axis in both: q over dim, weights over offset. A scale is multiplied into what is summed
with, once for a run, and never into the codes.

Each code is within half a step of its number. Scale and minimum are float16, the scale rounded up and the minimum down,
so that the steps from the stored minimum on reach every number; codes are then chosen against the stored values. A
number beyond float16 is stored as its largest number; a run with a NaN or an infinity in it reads as NaN, all of it.

Before that, a Hadamard matrix may rotate heads, which spreads outliers of one channel over all (QuIP#, QuaRot, 2024).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float, Shaped, UInt8
from torch import Tensor

QuantFormat = Literal["dense", "int8", "int4", "fp8"]
BYTES_PER_WORD = 4  # of a word
INTEGER_BITS: dict[QuantFormat, int] = {"int8": 8, "int4": 4}  # of a code that counts steps from a minimum
SCALED_FORMATS: tuple[QuantFormat, ...] = (*INTEGER_BITS, "fp8")  # codes with scales
FLOAT16_MAX = torch.finfo(torch.float16).max
E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max
QUANTIZED_NAMES = ("kc", "ks", "km", "vc", "vs", "vm")  # codes, scales, minima: of keys, of values


class QuantizedTensor(NamedTuple):
    """A quantized tensor: `number = minimum + scale * code`. FP8 has no minima, and codes that are the bits of e4m3
    numbers; dense has codes only: the numbers, in order."""

    codes: Tensor
    scales: Tensor | None = None
    minima: Tensor | None = None

    @property
    def kind(self) -> QuantFormat:
        if self.scales is None:
            return "dense"
        if self.minima is None:
            return "fp8"
        codes = self.scales.shape[-1] // self.codes.shape[-3]
        return next(kind for kind in INTEGER_BITS if codes_per_word(kind) == codes)

    def map(self, change: Callable[[Tensor], Tensor]) -> QuantizedTensor:
        """Apply the same change to all its tensors."""
        scales, minima = (None if part is None else change(part) for part in (self.scales, self.minima))
        return QuantizedTensor(change(self.codes), scales, minima)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def kernel_tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return codes, scales and minima; where FP8 has no minima its scales stand in for them, unread."""
        assert self.scales is not None
        return self.codes, self.scales, self.scales if self.minima is None else self.minima

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for tensor in self if tensor is not None)


def codes_per_word(kind: QuantFormat) -> int:
    """Return the number of codes of one word."""
    return 8 * BYTES_PER_WORD // INTEGER_BITS.get(kind, 8)


def pack_codes(
    codes: UInt8[Tensor, "*before summed kept"], kind: QuantFormat
) -> UInt8[Tensor, "*before word kept four"]:
    """Store codes in words, each next four codes of a word in the next higher bits of its four bytes: in INT4 byte i of
    word w has code 8 w + i below and code 8 w + 4 + i above."""
    count = codes_per_word(kind) // BYTES_PER_WORD
    parts = rearrange(codes, "... (word part four) kept -> part ... word kept four", part=count, four=BYTES_PER_WORD)
    return functools.reduce(torch.bitwise_or, [part << (8 * at // count) for at, part in enumerate(parts)]).contiguous()


def unpack_codes(
    stored: UInt8[Tensor, "*before word kept four"], kind: QuantFormat
) -> UInt8[Tensor, "*before summed kept"]:
    """Undo `pack_codes`."""
    bits = INTEGER_BITS.get(kind, 8)
    if bits == 8:  # nothing to shift
        return rearrange(stored, "... word kept four -> ... (word four) kept")
    parts = torch.stack([(stored >> at) & (2**bits - 1) for at in range(0, 8, bits)])
    return rearrange(parts, "part ... word kept four -> ... (word part four) kept")


def dequantize(quantized: QuantizedTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the numbers, [..., summed, kept], computed in `dtype`; a dense tensor as it is stored."""
    if quantized.scales is None:
        return quantized.codes.to(dtype)
    codes = unpack_codes(quantized.codes, quantized.kind)
    numbers = decode_e4m3(codes, dtype) if quantized.kind == "fp8" else codes.to(dtype)
    runs = rearrange(numbers, "... summed (part run) -> ... part summed run", part=quantized.scales.shape[-2])
    runs = runs * quantized.scales.to(dtype)[..., None]
    if quantized.minima is not None:
        runs = runs + quantized.minima.to(dtype)[..., None]
    return rearrange(runs, "... part summed run -> ... summed (part run)")


def decode_e4m3(codes: Shaped[Tensor, "*any"], dtype: torch.dtype) -> Float[Tensor, "*any"]:
    """Return bits of e4m3 as numbers, exact in every `dtype`. The bits of NaN, which `quantize` never writes, are none
    here.

        e4m3     s eeee mmm          bias 7
        float16  s 0eeee mmm0000000  bias 15: the number, and 2 ** 8 too small

    A conversion from float8 is one number at a time on a CPU, by torch.compile too; this is shifts and a conversion
    that it has for vectors.
    """
    bits = codes.view(torch.int8).to(torch.int16) << 7  # the sign, extended, lies in two places
    return (bits & ~0x4000).view(torch.float16).to(dtype) * 2**8


def storage_shapes(
    kind: QuantFormat, before: tuple[int, ...], summed: int, kept: int, run: int
) -> list[tuple[tuple, torch.dtype]]:
    """Return shapes and types of the tensors that hold numbers [*before, summed, kept] in a format, a scale for `run`
    of them. Raises ValueError where words or runs do not fit."""
    each = codes_per_word(kind)
    if summed % each or kept % run:
        raise ValueError(f"{kind}: words of {each} and runs of {run} do not divide {summed} x {kept} numbers")
    scales = ((*before, kept // run, summed), torch.float16)
    return [
        ((*before, summed // each, kept, BYTES_PER_WORD), torch.uint8),
        scales,
        *([scales] if kind in INTEGER_BITS else []),
    ]


def bits_per_number(kind: QuantFormat, run: int, dense: torch.dtype) -> float:
    """Return bits per number: those of a code, and its part of what a run of `run` numbers shares."""
    if kind == "dense":
        return 8.0 * dense.itemsize
    return 32 / codes_per_word(kind) + (32 if kind in INTEGER_BITS else 16) / run


def hadamard_rotate(x: Tensor) -> Tensor:
    """Rotate x [..., dim] by H / sqrt(dim), rounded once to the type of x; H is Sylvester's, so that twice is once
    back.

    By butterflies (the fast Walsh-Hadamard transform) in float64, not a product of matrices: a product's bits depend
    on how many rows it has, and a bit decides a code that lies between two. ValueError where dim is no power of two.
    """
    dim = x.shape[-1]
    if dim < 1 or dim & (dim - 1):
        raise ValueError(f"a Hadamard rotation needs a head width that is a power of two, not {dim}")
    rotated, half = x.double(), 1
    while half < dim:
        above, below = rotated.unflatten(-1, (dim // (2 * half), 2, half)).unbind(-2)
        rotated = torch.stack([above + below, above - below], dim=-2).flatten(-3)
        half *= 2
    return (rotated * dim**-0.5).to(x.dtype)


def quantize(
    numbers: Float[Tensor, "*before summed kept"], kind: QuantFormat, numbers_per_scale: int
) -> QuantizedTensor:
    """Quantize `numbers` to a format, with a scale for each `numbers_per_scale` of them along `kept`."""
    if kind == "dense":
        return QuantizedTensor(numbers)
    exact = numbers.to(torch.promote_types(numbers.dtype, torch.float32))
    sound = torch.where(exact.isfinite(), exact.clamp(-FLOAT16_MAX, FLOAT16_MAX), torch.nan)
    runs = rearrange(sound, "... summed (part run) -> ... part summed run", run=numbers_per_scale)
    scales, minima, codes = _fp8(runs) if kind == "fp8" else _integers(runs, 2 ** INTEGER_BITS[kind] - 1)
    return QuantizedTensor(
        pack_codes(rearrange(codes, "... part summed run -> ... summed (part run)"), kind), scales, minima
    )


def _integers(runs: Tensor, levels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize by steps up from the minimum. A constant run that float16 holds has the scale 0 and is exact."""
    lowest, highest = runs.amin(-1), runs.amax(-1)
    minima = _rounded(lowest, up=False)
    scales = _rounded((highest - minima.to(runs.dtype)) / levels, up=True)
    steps = scales.to(runs.dtype)[..., None]
    codes = (runs - minima.to(runs.dtype)[..., None]) / torch.where(steps == 0, 1.0, steps)
    return scales, minima, codes.nan_to_num(0.0).round().clamp(0, levels).to(torch.uint8)


def _fp8(runs: Tensor) -> tuple[Tensor, None, Tensor]:
    """Quantize to FP8: the largest of a run becomes e4m3's largest, 448."""
    scales = _rounded(runs.abs().amax(-1) / E4M3_MAX, up=True)
    steps = scales.to(runs.dtype)[..., None]
    codes = (runs / torch.where(steps == 0, 1.0, steps)).nan_to_num(0.0).clamp(-E4M3_MAX, E4M3_MAX)
    return scales, None, codes.to(torch.float8_e4m3fn).view(torch.uint8)


def _rounded(exact: Tensor, up: bool) -> Tensor:
    """Return float16 numbers not below (or not above) `exact`, and the nearest such."""
    near = exact.half()
    bits = near.view(torch.int16).int()
    ordered = torch.where(bits < 0, -(bits & 0x7FFF), bits)  # neighbours differ by one, on both sides of zero
    ordered = ordered + (1 if up else -1)
    bits = torch.where(ordered < 0, -ordered - 0x8000, ordered).to(torch.int16)
    wide = near.to(exact.dtype)
    return torch.where(wide < exact if up else wide > exact, bits.view(torch.float16), near)
