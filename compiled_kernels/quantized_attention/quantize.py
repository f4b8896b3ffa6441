"""Quantize numbers to codes of few bits with a scale (and a minimum) for each run of numbers, in a layout for sums over
one axis.

    numbers  [..., summed, kept]      keys: summed = dim, kept = offset       values: summed = offset, kept = dim
    codes    [..., word, kept, 4]     four bytes a word, one after another along `summed`; INT4: eight halves of bytes
    scales   [..., part, summed]      one for each run of kept / part numbers

Keys have a scale for each channel and run of tokens, values a scale for each token and run of columns (KIVI, Liu et al.
2024), and attention sums over the same axis in both: q over dim, weights over offset. The scale is multiplied into the
other factor of the sum, once for a run, and never into the codes.

Each code is within half a step of its number. Scale and minimum are float16, the scale rounded up and the minimum down,
so that the steps from the stored minimum reach every number; codes are chosen for the stored values. A number beyond
the range of float16 is stored as float16's largest number; a run that contains NaN or infinity reads as NaN.

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
BYTES_PER_WORD = 4  # bytes of a word
INTEGER_BITS: dict[QuantFormat, int] = {"int8": 8, "int4": 4}  # bits of codes that count steps from a minimum
SCALED_FORMATS: tuple[QuantFormat, ...] = (*INTEGER_BITS, "fp8")  # codes with scales
FLOAT16_MAX = torch.finfo(torch.float16).max
E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max
QUANTIZED_NAMES = ("kc", "ks", "km", "vc", "vs", "vm")  # codes, scales, minima: of keys, of values


class QuantizedTensor(NamedTuple):
    """A quantized tensor: `number = minimum + scale * code`. FP8 has no minima, and its codes are the bits of e4m3
    numbers. A dense tensor has only codes, which are the numbers themselves."""

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
        """Return the tensor with `change` applied to its codes, scales and minima."""
        scales, minima = (None if part is None else change(part) for part in (self.scales, self.minima))
        return QuantizedTensor(change(self.codes), scales, minima)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def kernel_tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return codes, scales and minima. FP8 has no minima: its scales stand in their place and are not read."""
        assert self.scales is not None
        return self.codes, self.scales, self.scales if self.minima is None else self.minima

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for tensor in self if tensor is not None)


def codes_per_word(kind: QuantFormat) -> int:
    """Return the number of codes in a word."""
    return 8 * BYTES_PER_WORD // INTEGER_BITS.get(kind, 8)


def pack_codes(
    codes: UInt8[Tensor, "*before summed kept"], kind: QuantFormat
) -> UInt8[Tensor, "*before word kept four"]:
    """Pack codes into words of four bytes. The first four codes of a word go into the lowest bits of its bytes, the
    next four into the bits above: for INT4, byte i of word w has code 8 w + i in its low half and code 8 w + 4 + i in
    its high half."""
    count = codes_per_word(kind) // BYTES_PER_WORD
    parts = rearrange(codes, "... (word part four) kept -> part ... word kept four", part=count, four=BYTES_PER_WORD)
    return functools.reduce(torch.bitwise_or, [part << (8 * at // count) for at, part in enumerate(parts)]).contiguous()


def unpack_codes(
    stored: UInt8[Tensor, "*before word kept four"], kind: QuantFormat
) -> UInt8[Tensor, "*before summed kept"]:
    """Return the codes that `pack_codes` packed."""
    bits = INTEGER_BITS.get(kind, 8)
    if bits == 8:  # nothing to shift
        return rearrange(stored, "... word kept four -> ... (word four) kept")
    parts = torch.stack([(stored >> at) & (2**bits - 1) for at in range(0, 8, bits)])
    return rearrange(parts, "part ... word kept four -> ... (word part four) kept")


def dequantize(quantized: QuantizedTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the tensor's numbers [..., summed, kept], computed in `dtype`; a dense tensor is only converted to
    `dtype`.
    """
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
    """Convert the bits of e4m3 numbers to `dtype`, which is exact. The bits of NaN, which `quantize` never writes, are
    not supported.

        e4m3     s eeee mmm          bias 7
        float16  s 0eeee mmm0000000  bias 15: the number, and 2 ** 8 too small

    A CPU converts float8 one number at a time, under torch.compile too; this function uses shifts and a conversion that
    has vector instructions.
    """
    bits = codes.view(torch.int8).to(torch.int16) << 7  # the extended sign occupies two bits
    return (bits & ~0x4000).view(torch.float16).to(dtype) * 2**8


def storage_shapes(
    kind: QuantFormat, before: tuple[int, ...], summed: int, kept: int, run: int
) -> list[tuple[tuple, torch.dtype]]:
    """Return the shapes and types of the tensors that store numbers [*before, summed, kept] in a format, with a scale
    for each `run` of numbers. Raises ValueError if words or runs do not divide the axes."""
    each = codes_per_word(kind)
    if summed % each or kept % run:
        raise ValueError(f"{kind}: {summed} x {kept} numbers are not multiples of {each} x {run}")
    scales = ((*before, kept // run, summed), torch.float16)
    return [
        ((*before, summed // each, kept, BYTES_PER_WORD), torch.uint8),
        scales,
        *([scales] if kind in INTEGER_BITS else []),
    ]


def bits_per_number(kind: QuantFormat, run: int, dense: torch.dtype) -> float:
    """Return the number of bits that one number takes: its code, and its fraction of the scale (and minimum) that `run`
    numbers share.
    """
    if kind == "dense":
        return 8.0 * dense.itemsize
    return 32 / codes_per_word(kind) + (32 if kind in INTEGER_BITS else 16) / run


def hadamard_rotate(x: Tensor) -> Tensor:
    """Rotate x [..., dim] by H / sqrt(dim), rounded once to the type of x. H is Sylvester's Hadamard matrix, so that
    two rotations restore x.

    Uses butterflies (the fast Walsh-Hadamard transform) in float64 rather than a matrix product: a product's bits
    depend on the number of rows, and one bit can change the code of a number midway between two codes. Raises
    ValueError if dim is not a power of two.
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
    """Quantize `numbers` to a format, with a scale for each `numbers_per_scale` adjacent numbers along the axis
    `kept`.
    """
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
    """Quantize by steps up from the minimum. A constant run of a float16 number has scale 0 and is exact."""
    lowest, highest = runs.amin(-1), runs.amax(-1)
    minima = _rounded(lowest, up=False)
    scales = _rounded((highest - minima.to(runs.dtype)) / levels, up=True)
    steps = scales.to(runs.dtype)[..., None]
    codes = (runs - minima.to(runs.dtype)[..., None]) / torch.where(steps == 0, 1.0, steps)
    return scales, minima, codes.nan_to_num(0.0).round().clamp(0, levels).to(torch.uint8)


def _fp8(runs: Tensor) -> tuple[Tensor, None, Tensor]:
    """Quantize to FP8: a run's largest absolute number becomes 448, the largest number of e4m3."""
    scales = _rounded(runs.abs().amax(-1) / E4M3_MAX, up=True)
    steps = scales.to(runs.dtype)[..., None]
    codes = (runs / torch.where(steps == 0, 1.0, steps)).nan_to_num(0.0).clamp(-E4M3_MAX, E4M3_MAX)
    return scales, None, codes.to(torch.float8_e4m3fn).view(torch.uint8)


def _rounded(exact: Tensor, up: bool) -> Tensor:
    """Return the nearest float16 numbers that are not below (or not above) `exact`."""
    near = exact.half()
    bits = near.view(torch.int16).int()
    ordered = torch.where(bits < 0, -(bits & 0x7FFF), bits)  # neighbours differ by one, on both sides of zero
    ordered = ordered + (1 if up else -1)
    bits = torch.where(ordered < 0, -ordered - 0x8000, ordered).to(torch.int16)
    wide = near.to(exact.dtype)
    return torch.where(wide < exact if up else wide > exact, bits.view(torch.float16), near)
