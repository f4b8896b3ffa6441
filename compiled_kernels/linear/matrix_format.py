"""Define the storage formats of a matrix: dense, or quantized to codes of few bits with scales and, in some formats,
minima.

Formats of GGUF files are words of 32 bits (see linear/planes.py), described by the table `WORDS`; Q4_0 and Q4_1 are
stored as INT4 in groups of 32, without and with minima.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

CODE_DTYPES = {"int8": torch.int8, "int4": torch.int32, "fp8": torch.float8_e4m3fn, "float16": torch.float16}
SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WORD_BITS = 32


@dataclass(frozen=True)
class SubScales:
    """The layout of sub-scales: integers that multiply a block's scale and minimum, one for each group, stored in words
    after the block's codes.

    Args:
        words: number of words of a block that hold them.
        scale: pairs (bits, first bit) of fields that make up a number, lowest bits first; the field of group g begins
            at first bit + bits * g, counted through the words.
        minimum: such pairs for the numbers that multiply the minimum; empty without minima.
        offset: number subtracted from a scale.
        sign_bit: a bit of a scale that is inverted first, for two's complement.
    """

    words: int
    scale: tuple[tuple[int, int], ...]
    minimum: tuple[tuple[int, int], ...] = ()
    offset: int = 0
    sign_bit: int = 0

    @property
    def largest(self) -> int:
        """Return the largest integer that can multiply a block's scale."""
        return (1 << sum(bits for bits, _ in self.scale)) - 1 - self.offset


@dataclass(frozen=True)
class WordLayout:
    """The layout in 32-bit words of a block of columns of one row: the planes of its codes, the widest first, then its
    sub-scales.

    Args:
        planes: bits of each plane; the first has the lowest bits of a code.
        block: columns.
        group: columns that share a scale.
        offset: number subtracted from a code.
        sign_bit: a bit of a code that is inverted first, for two's complement.
        values: the integers that codes stand for, instead of an offset.
        minima: the format has minima, which are added, or with sub-scales subtracted.
        sub_scales: layout of the sub-scales, for blocks with scales of two levels.
        exponents: scales are bytes e that mean 2^(e - 128): half of the e8m0 value, because stored values are doubled.
    """

    planes: tuple[int, ...]
    block: int = 32
    group: int = 32
    offset: int = 0
    sign_bit: int = 0
    values: tuple[int, ...] = ()
    minima: bool = False
    sub_scales: SubScales | None = None
    exponents: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for layouts that no product can load (see blocked/numbers.py, triton_words.py)."""
        if self.bits > 6 and (self.planes, self.offset, self.sign_bit) != ((8,), 128, 128):
            raise ValueError(f"{self}: codes of more than 6 bits must be bytes with an offset and a sign bit of 128")
        if self.values and (self.planes, len(self.values)) != ((4,), 16):
            raise ValueError(f"{self}: a table of values must have 16 values and one plane of 4 bits")
        if len(self.planes) > 2 or any(bits * self.block % WORD_BITS for bits in self.planes):
            raise ValueError(f"{self}: a block must have one or two planes, each of whole words")

    @property
    def bits(self) -> int:
        return sum(self.planes)

    @property
    def plane_words(self) -> int:
        """Return the number of words of a block that hold codes."""
        return self.bits * self.block // WORD_BITS

    @property
    def words(self) -> int:
        """Return the number of words of a block."""
        return self.plane_words + (self.sub_scales.words if self.sub_scales else 0)

    def row_words(self, columns: int) -> int:
        """Return the number of words of a row of `columns` columns, a multiple of the block's."""
        return columns // self.block * self.words

    @property
    def scale_columns(self) -> int:
        """Return the number of columns that share one element of the tensor of scales."""
        return self.block if self.sub_scales else self.group

    @property
    def scales(self) -> torch.dtype:
        """Return the dtype of a format's scales."""
        return torch.uint8 if self.exponents else torch.float16


IQ4_NL_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1_TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
SIX_BITS = SubScales(3, ((4, 0), (2, 64)), ((4, 32), (2, 80)))
WORDS: dict[str, WordLayout] = {
    "q5_0": WordLayout((4, 1), offset=16),
    "q5_1": WordLayout((4, 1), minima=True),
    "q8_0": WordLayout((8,), offset=128, sign_bit=128),
    "iq4_nl": WordLayout((4,), values=IQ4_NL_VALUES),
    "mxfp4": WordLayout((4,), values=E2M1_TWICE, exponents=True),
    "q2_k": WordLayout((2,), 256, 16, minima=True, sub_scales=SubScales(4, ((4, 0),), ((4, 64),))),
    "q3_k": WordLayout((2, 1), 256, 16, offset=4, sub_scales=SubScales(3, ((4, 0), (2, 64)), offset=32)),
    "q4_k": WordLayout((4,), 256, minima=True, sub_scales=SIX_BITS),
    "q5_k": WordLayout((4, 1), 256, minima=True, sub_scales=SIX_BITS),
    "q6_k": WordLayout((4, 2), 256, 16, offset=32, sub_scales=SubScales(4, ((8, 0),), offset=128, sign_bit=128)),
}


@dataclass(frozen=True)
class MatrixFormat:
    """The storage format of a matrix [out, in]. In a quantized format a value is `code * scale + minimum`.

    Args:
        codes: `dense`: in the model's type. `int8`: -128..127. `int4`: -8..7, in words of code + 8; with minima 0..15,
            in words of the code (see linear/planes.py). `fp8`: float8_e4m3fn, without NaN. `float16`: numbers, in a
            model of another type. Others: words described in `WORDS` (see `MatrixFormat.named`).
        group: columns that share a scale and a minimum; the last group may have fewer. 0 is a whole row.
        scales: type of the scales: [out, group]; for whole rows float32 [out].
        minima: type of the minima, [out, group]; None without minima.
    """

    codes: str = "dense"
    group: int = 0
    scales: torch.dtype = torch.float32
    minima: torch.dtype | None = None

    def __post_init__(self) -> None:
        words = self.words
        if words is None and not self.is_dense and self.codes not in CODE_DTYPES:
            raise ValueError(f"no format is called {self.codes!r}; known: dense, {', '.join((*CODE_DTYPES, *WORDS))}")
        if words is not None and (self.group, self.minima is not None) != (words.group, words.minima):
            raise ValueError(f"{self}: needs groups of {words.group} {'with' if words.minima else 'without'} minima")
        by_row = not self.group
        if by_row and (self.codes == "int4" or self.minima is not None or self.scales != torch.float32):
            raise ValueError(f"{self}: one scale for a row needs int8 or fp8, float32 scales and no minima")
        if self.codes == "int4" and self.group % (WORD_BITS // 4):
            raise ValueError(f"{self}: groups of INT4 must be a multiple of 8 columns")
        if self.codes == "fp8" and self.minima is not None:
            raise ValueError(f"{self}: fp8 supports no minima")

    @classmethod
    def named(cls, name: str) -> MatrixFormat:
        """Return the format with this name in `WORDS`; its scales are float16 or exponents, its minima float16."""
        words = WORDS.get(name)
        if words is None:
            raise ValueError(f"no format in words is called {name!r}; known: {', '.join(WORDS)}")
        return cls(name, words.group, words.scales, torch.float16 if words.minima else None)

    @classmethod
    def of(cls, codes: str, group: int, scales: torch.Tensor | None, minima: torch.Tensor | None) -> MatrixFormat:
        """Return the format of a matrix from the name of its codes, the number of columns per group (words have their
        own), its scales and its minima. Raises ValueError if there is no such format."""
        if scales is None:
            return DENSE_MATRIX
        if codes in WORDS:
            return cls.named(codes)
        return cls(codes, group, scales.dtype if group else torch.float32, None if minima is None else minima.dtype)

    def __str__(self) -> str:
        if self.words is not None:
            return self.codes
        words = [self.codes, *([f"by {self.group}"] if self.group else [])]
        return " ".join([*words, *(["with minima"] if self.minima is not None else [])])

    @property
    def words(self) -> WordLayout | None:
        """Return the layout of a format that is stored in words; None for other formats."""
        return WORDS.get(self.codes)

    @property
    def unit(self) -> int:
        """Return the number of columns that are stored together; 0 if each is stored separately."""
        return self.group if self.words is None else self.words.block

    @property
    def is_dense(self) -> bool:
        return self.codes == "dense"

    @property
    def scales_rows(self) -> bool:
        """Return whether each row has one scale, which multiplies the row's sum of products."""
        return self.codes in ("int8", "fp8") and not self.group

    def num_groups(self, columns: int) -> int:
        return -(-columns // (self.group or columns))

    def storage(self, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the shape and dtype of the codes, scales and minima (if any) of a quantized matrix."""
        if (words := self.words) is not None:
            groups, width = (rows, columns // words.scale_columns), columns // words.block * words.words
        else:
            groups = (rows, self.num_groups(columns)) if self.group else (rows,)
            width = columns // 8 if self.codes == "int4" else columns
        dtype = CODE_DTYPES.get(self.codes, torch.int32)
        beside = {} if self.codes == "float16" else {"scales": (groups, self.scales)}
        tensors = {"weight": ((rows, width), dtype), **beside}
        return tensors if self.minima is None else {**tensors, "minima": (groups, self.minima)}

    def nbytes(self, rows: int, columns: int) -> int:
        """Return the number of bytes of a quantized matrix, scales and minima included."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.storage(rows, columns).values())

    def problem(self, columns: int) -> str | None:
        """Return why a matrix with this number of columns cannot be stored in this format; None if it can."""
        if self.codes == "int4" and columns % self.group:
            return f"INT4 groups of {self.group} do not divide"
        if self.words is not None and columns % self.words.block:
            return f"blocks of {self.words.block} ({self}) do not divide"
        return None


DENSE_MATRIX = MatrixFormat()
INT8_MATRIX = MatrixFormat("int8")
