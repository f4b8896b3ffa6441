"""The shape that a product with a weight in panels is compiled for."""

from __future__ import annotations

from dataclasses import dataclass, field

from compiled_kernels.blocked.layout import PANEL, PANEL_PAIR
from compiled_kernels.linear_w8a8.mlir_rows import Int8Rows
from compiled_kernels.mlir_text import SIZE_BOUND, Target, memref

VALUES_PER_WORD = {"f32": 1, "bf16": 2, "i8": 4, "i4": 8, "f4": 8}  # of a weight, in a word
TILE_ROWS = 6  # tokens whose sums are in registers at once: 6 x 4 vectors of 32 registers, 6 x 2 of 16
MAX_K_BLOCK = (
    320  # of the width, walked in one go: a pair of panels of bfloat16 that long fills a cache of the first level
)


@dataclass(frozen=True)
class Panels:
    """x [rows, width] of type `x_dtype` (f32 or bf16) times a weight [out, width] in panels, of `weight_dtype` f32,
    bf16 or i8 (one scale a column); or with a scale for each `quant_group` along the width, i8, i4 or f4 (see
    linear/mlir_codes.py): scales are float16, those of f4 exponents e8m0, and a code times its scale is float32.

    Sums are of blocks of `k_block` along the width, each begun at zero and added to those before it: the order in
    which a row's products are added up is the same for every number of rows and threads. With `w8a8` x comes as rows
    of INT8 (made of numbers of type `x`) and is multiplied as such with a weight of i8.
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

    @property
    def int8_rows(self) -> Int8Rows:
        """Return the layout of quantized x with `w8a8`."""
        return Int8Rows(self.in_features, self.x_dtype, self.target, panels=True)

    @property
    def sum_kind(self) -> str:
        return "i32" if self.w8a8 else "f32"

    @property
    def uses_bf16_pairs(self) -> bool:
        """Tell whether sums are dot products of bfloat16 pairs; they are of float32 otherwise."""
        fits = self.weight_dtype != "f32" and not self.w8a8 and not self.quant_group
        return self.target.has_bf16_dot and self.x_dtype == "bf16" and fits

    @property
    def lanes(self) -> int:
        """Return the columns of a vector of sums."""
        return 16 if self.uses_bf16_pairs else self.target.lanes

    @property
    def vectors_per_tile(self) -> int:
        """Return the vectors of sums side by side in a tile of many rows: with `TILE_ROWS` they fill three quarters of
        the registers, and leave room for the weights and one number of x."""
        return self.target.registers // 8

    @property
    def values_per_word(self) -> int:
        """Return the values of the weight in a word."""
        return VALUES_PER_WORD[self.weight_dtype]

    @property
    def k_block(self) -> int:
        """Return how much of the width is summed before it joins the sums of what came before."""
        blocks = -(-self.in_features // MAX_K_BLOCK)
        return -(-self.in_features // (blocks * 32)) * 32

    @property
    def weight_types(self) -> tuple[str, ...]:
        """Return the memref types of the weight's words, of its scales and of its bias, as far as there are such."""
        scales = (memref((self.out_features,), "f32"),) if self.weight_dtype == "i8" else ()
        if self.quant_group:
            groups = self.out_features // PANEL, self.in_features // self.quant_group, PANEL
            scales = (memref(groups, "i8" if self.weight_dtype == "f4" else "f16"),)
        bias = (memref((self.out_features,), self.x_dtype),) if self.bias else ()
        return (
            memref((self.out_features // PANEL, self.in_features // self.values_per_word, PANEL), "i32"),
            *scales,
            *bias,
        )

    def __post_init__(self) -> None:
        if self.w8a8 and self.weight_dtype != "i8":
            raise ValueError(f"{self.name}: rows of INT8 are multiplied with weights of i8, not of {self.weight_dtype}")
        if self.out_features % PANEL_PAIR or self.in_features % (2 * self.values_per_word):
            raise ValueError(
                f"{self.name}: {self.out_features} x {self.in_features} {self.weight_dtype} is not for panels"
            )
        if self.quant_group and (self.in_features % self.quant_group or self.quant_group % self.values_per_word):
            raise ValueError(f"{self.name}: groups of {self.quant_group} are not whole words of {self.in_features}")
        if self.weight_dtype in ("i4", "f4") and not self.quant_group:
            raise ValueError(f"{self.name}: codes of {self.weight_dtype} have a scale for a group")


def rows_type(columns: int, kind: str, rows: int = SIZE_BOUND) -> str:
    """Return memref type of rows, of any number unless given."""
    return memref((rows, columns), kind)
