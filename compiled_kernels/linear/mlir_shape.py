"""The shape that a product is compiled for, and the storage of its weight."""

from __future__ import annotations

import math
from dataclasses import dataclass

from compiled_kernels.linear.mlir_codes import CODE_BITS
from compiled_kernels.linear_w8a8.mlir_rows import Int8Rows
from compiled_kernels.mlir_text import SIZE_BOUND, Target, largest_divisor, memref

MAX_ROWS_TOGETHER = (
    4  # tokens whose sums are kept at once; more are more passes over weights that lie in the nearest cache
)
PREFETCH_BLOCK_BYTES = 8192  # bytes: with blocks of weights up to this size the next block is fetched while one is read


@dataclass(frozen=True)
class Product:
    """x [rows, width] of type `x_dtype` times a weight [out, width] stored as `weight_dtype`: f32, bf16, or a kind of
    codes (see mlir_codes.py). Codes have a scale for each `quant_group` columns, of type `scales`, the last of them
    for what is left; and a minimum beside it, where `minima` is a type. With a group of 0 a row has one scale, f32.

    `accumulate`: add to `out` in place of overwriting it. `segments`: `out` is that many equal runs of columns, each
    walked by itself. `any_rows`: the number of rows is an argument, at least `rows`, which then is the number walked
    together. `w8a8`: x comes as rows of INT8 (made of numbers of type `x_dtype`) and is multiplied as such with a
    weight of i8."""

    name: str
    rows: int
    in_features: int
    out_features: int
    weight_dtype: str
    x_dtype: str
    target: Target
    quant_group: int = 0
    bias: bool = False
    accumulate: bool = False
    segments: int = 1
    any_rows: bool = False
    w8a8: bool = False
    scales: str = "f16"
    minima: str = ""

    def __post_init__(self) -> None:
        if self.w8a8 and (self.weight_dtype != "i8" or self.quant_group):
            raise ValueError(f"{self.name}: rows of INT8 are multiplied with weights of i8, not of {self.weight_dtype}")
        if self.any_rows and (self.accumulate or self.rows > MAX_ROWS_TOGETHER):
            raise ValueError(
                f"{self.name}: any number of rows overlaps its last two runs, of {MAX_ROWS_TOGETHER} at most"
            )

    @property
    def stored_rows(self) -> int:
        """Return the rows of x and out as their types have them: where the number is open, a bound."""
        return SIZE_BOUND if self.any_rows else self.rows

    @property
    def int8_rows(self) -> Int8Rows:
        """Return the layout of quantized x with `w8a8`."""
        return Int8Rows(self.in_features, self.x_dtype, self.target, panels=False)

    @property
    def uses_bf16_pairs(self) -> bool:
        """Return whether sums are dot products of bfloat16 pairs."""
        return (
            self.target.has_bf16_dot
            and self.x_dtype == "bf16"
            and self.weight_dtype != "f32"
            and self.shared_columns % 32 == 0
            and not self.w8a8
        )

    @property
    def in_halves(self) -> bool:
        """Return whether codes have 4 bits, two a byte: of a group's first half and of its second half."""
        return CODE_BITS.get(self.weight_dtype) == 4

    @property
    def scales_rows(self) -> bool:
        """Return whether a row's sum is scaled once."""
        return self.weight_dtype in CODE_BITS and not self.quant_group

    @property
    def last_group(self) -> int:
        """Return the columns of a last group that is not whole; 0 where all are."""
        return self.in_features % self.quant_group if self.quant_group else 0

    @property
    def shared_columns(self) -> int:
        """Return a number of columns that every group of columns is a multiple of."""
        return math.gcd(self.quant_group, self.in_features)

    @property
    def values_per_vector(self) -> int:
        """Return the numbers of x, and of a weight's row, in one vector (of codes of 4 bits: bytes, of two numbers
        each)."""
        if self.in_halves:
            return largest_divisor(self.quant_group // 2, 32)
        if self.w8a8:
            return self.int8_rows.values * self.lanes
        return 32 if self.uses_bf16_pairs else largest_divisor(self.shared_columns, self.target.lanes)

    @property
    def lanes(self) -> int:
        """Lanes of a vector of sums."""
        if self.w8a8:
            return largest_divisor(self.in_features, self.target.lanes)
        return 16 if self.uses_bf16_pairs else self.values_per_vector

    @property
    def block(self) -> int:
        """Return weight rows whose sums are kept at once."""
        return largest_divisor(
            self.out_features // self.segments,
            max(1, min(4, self.target.accumulators // min(self.rows, MAX_ROWS_TOGETHER))),
        )

    @property
    def prefetch_rows(self) -> int:
        """Return the rows from one that is read to one that is fetched meanwhile; 0 where rows are so long that the
        processor prefetches by itself."""
        bits = {"f32": 32, "bf16": 16, **CODE_BITS}[self.weight_dtype]
        row_bytes = self.in_features * bits / 8
        return self.block if self.block * row_bytes <= PREFETCH_BLOCK_BYTES else 0

    @property
    def x_type(self) -> str:
        if self.w8a8:
            return self.int8_rows.type(self.stored_rows)
        return memref((self.stored_rows, self.in_features), self.x_dtype)

    @property
    def weight_types(self) -> tuple[str, ...]:
        """Return the memref types of the weight, its scales, its minima and its bias, as far as there are such."""
        out, bits = self.out_features, CODE_BITS.get(self.weight_dtype)
        groups = (out, -(-self.in_features // self.quant_group)) if self.quant_group else (out,)
        found = [memref((out, self.in_features), self.weight_dtype)]
        if bits:
            scales = memref(groups, self.scales if self.quant_group else "f32")
            found = [memref((out, self.in_features * bits // 8), "i8"), scales]
        if self.minima:
            found.append(memref(groups, self.minima))
        return (*found, *([memref((out,), self.x_dtype)] if self.bias else []))

    @property
    def out_type(self) -> str:
        return memref((self.stored_rows, self.out_features), "f32")
