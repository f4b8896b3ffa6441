"""Define the shape for which a product with a weight in panels (see layout.py) is compiled."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from compiled_kernels.blocked.int8_rows import Int8Rows
from compiled_kernels.blocked.layout import PANEL, PANEL_PAIR
from compiled_kernels.builder.target import SIZE_BOUND, Target, memref
from compiled_kernels.linear.int8_activations import BLOCK
from compiled_kernels.linear.matrix_format import WORDS, WordLayout

VALUES_PER_WORD = {"f32": 1, "f16": 1, "bf16": 2}  # for dense weights
BYTES = WordLayout((8,), block=4, offset=128, sign_bit=128)
# Codes of one plane, in groups of any size: INT8; INT4, without and with minima; FP8 (E4M3).
CODES = {
    "i8": BYTES, "f8": BYTES, "i4": WordLayout((4,), block=8, offset=8), "u4": WordLayout((4,), block=8),
}  # fmt: skip
TILE_ROWS = 6  # tokens with sums in registers at once: 6 x 4 vectors with 32 registers, 6 x 2 with 16
# Maximum columns of the width per block: a pair of bfloat16 panels of this length fills a first-level cache.
MAX_K_BLOCK = 320
UNIT = 32  # maximum columns of codes read together: a word of the narrowest plane


@dataclass(frozen=True)
class Panels:
    """The product of x [rows, width] of type `x_dtype` (f32 or bf16) and a weight [out, width] in panels.
    `weight_dtype` is f32, bf16, f16, a format of `WORDS`, or codes of `CODES`. Codes have scales of type `scales` and,
    if `minima` is a type, minima for each `quant_group` of columns along the width; if `quant_group` is 0, one float32
    scale for each output column.

    Products are summed over runs of the width. A run's sum starts at zero, is multiplied by the run's scale if it has
    one, and is added to the total. So a row is summed in the same order for every number of rows and threads. With
    `w8a8`, x is rows of INT8 (quantized from `x_dtype`, with a scale for each `BLOCK` of columns, or one per row if the
    weight has one per row), multiplied with integer codes.
    """

    name: str
    in_features: int
    out_features: int
    weight_dtype: str
    x_dtype: str
    target: Target
    bias: bool = False
    w8a8: bool = field(default=False, kw_only=True)
    quant_group: int = field(default=0, kw_only=True)
    scales: str = field(default="f16", kw_only=True)
    minima: str = field(default="", kw_only=True)

    @property
    def words(self) -> WordLayout | None:
        """Return the layout of codes in words; None for dense weights."""
        return WORDS.get(self.weight_dtype) or CODES.get(self.weight_dtype)

    @property
    def group(self) -> int:
        """Return the number of columns that share a scale; 0 without scales, or with one per row."""
        return self.words.group if self.words and self.weight_dtype in WORDS else self.quant_group

    @property
    def scales_rows(self) -> bool:
        """Return whether each row of a weight in codes has a single scale, which multiplies the row's sum."""
        return self.words is not None and not self.group

    @property
    def has_minima(self) -> bool:
        return bool(self.minima) or self.words is not None and self.words.minima

    @property
    def sum_group(self) -> int:
        """Return the number of columns along the width whose products are summed separately; with `w8a8` they share a
        scale of x too.
        """
        return math.gcd(BLOCK, self.group) if self.w8a8 and self.group else self.group

    @property
    def int8_rows(self) -> Int8Rows:
        """Return the layout of x in INT8, for a product with `w8a8`."""
        assert self.words is not None
        block, group = (BLOCK, self.sum_group) if self.group else (self.in_features, self.in_features)
        bits = 8 if self.words.values else self.words.bits
        values = 4 if self.target.has_int8_dot or bits < 8 else 2
        return Int8Rows(self.in_features, self.x_dtype, self.target, block, group, values, bits)

    @property
    def added_to_codes(self) -> int:
        """Return the number that is added to the codes to make the unsigned bytes that are multiplied with INT8."""
        assert self.words is not None
        return 0 if self.int8_rows.values == 2 else 128 if self.words.values else self.words.offset

    @property
    def sum_kind(self) -> str:
        """Return the type of a run's sums: int32 if all products have one scale, else float32."""
        return "i32" if self.w8a8 and not self.group else "f32"

    @property
    def uses_bf16_pairs(self) -> bool:
        """Return whether sums are dot products of bfloat16 pairs, which represent every code exactly; otherwise they
        are float32.
        """
        exact = self.weight_dtype not in ("f32", "f16")
        return self.target.has_bf16_dot and self.x_dtype == "bf16" and exact and not self.w8a8

    @property
    def lanes(self) -> int:
        """Return the number of columns in a vector of sums."""
        return 16 if self.uses_bf16_pairs else self.target.lanes

    @property
    def vectors_per_tile(self) -> int:
        """Return the number of column vectors in a tile of many rows: with `TILE_ROWS` rows, their sums fill three
        quarters of the registers, and leave room for the weights and one number of x.
        """
        return self.target.registers // 8

    @property
    def unit(self) -> int:
        """Return the number of columns along the width that are read together: a unit."""
        if self.words is None:
            return VALUES_PER_WORD[self.weight_dtype]
        if self.weight_dtype in WORDS:
            return UNIT
        return math.gcd(UNIT, self.in_features, self.group)

    @property
    def unit_words(self) -> int:
        """Return the number of words of a unit, for one output column."""
        return self.unit * self.words.bits // 32 if self.words else 1

    @property
    def run(self) -> int:
        """Return the number of columns along the width whose products are summed before a scale multiplies the sum: a
        run.
        """
        return max(self.unit, self.sum_group) if self.group else self.k_block

    @property
    def k_block(self) -> int:
        """Return the number of columns along the width that are processed for some rows before the next rows: a
        multiple of a group.
        """
        whole = math.lcm(32, self.group or 1)
        blocks = -(-self.in_features // MAX_K_BLOCK)
        return -(-self.in_features // (blocks * whole)) * whole

    @property
    def panels(self) -> int:
        """Return the number of panels of the weight, an even number; output columns beyond the weight's last are
        zero.
        """
        return 2 * -(-self.out_features // PANEL_PAIR)

    @property
    def row_words(self) -> int:
        """Return the number of words per row of the weight."""
        return self.words.row_words(self.in_features) if self.words else self.in_features // self.unit

    @property
    def weight_types(self) -> tuple[str, ...]:
        """Return the memref types of the weight's words, and of its scales, minima and bias, if it has them."""
        found = [memref((self.panels, self.row_words, PANEL), "f16" if self.weight_dtype == "f16" else "i32")]
        if self.scales_rows:
            found.append(memref((self.panels * PANEL,), "f32"))
        if self.group:
            columns = self.words.scale_columns if self.words and self.weight_dtype in WORDS else self.group
            scales = "i8" if self.words and self.words.exponents else self.scales
            kinds = (scales, self.minima or "f16") if self.has_minima else (scales,)
            found += [memref((self.panels, self.in_features // columns, PANEL), kind) for kind in kinds]
        return (*found, *([memref((self.panels * PANEL,), self.x_dtype)] if self.bias else []))

    def __post_init__(self) -> None:
        if self.w8a8 and (self.weight_dtype == "f8" or not self.words or self.sum_group % 8):
            grouped = f" by {self.group}" if self.group else ""
            raise ValueError(f"{self.name}: activations in INT8 are not supported with {self.weight_dtype}{grouped}")
        whole = self.words.block if self.words else VALUES_PER_WORD[self.weight_dtype]
        if self.in_features % whole:
            raise ValueError(f"{self.name}: a width of {self.in_features} does not fit panels of {self.weight_dtype}")
        if self.weight_dtype in WORDS and whole % UNIT:
            raise ValueError(f"{self.name}: blocks of {whole} columns are not a multiple of {UNIT}")
        if self.quant_group and (self.in_features % self.quant_group or self.quant_group % whole):
            raise ValueError(f"{self.name}: groups of {self.quant_group} do not fit {self.in_features} columns")
        if self.scales_rows and self.weight_dtype not in ("i8", "f8"):
            raise ValueError(f"{self.name}: {self.weight_dtype} needs a scale for each group, not for each row")


def rows_type(columns: int, kind: str, rows: int = SIZE_BOUND) -> str:
    """Return the memref type of a matrix of rows, by default with any number of rows."""
    return memref((rows, columns), kind)
