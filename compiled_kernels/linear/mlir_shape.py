"""The shape that a product is compiled for, and the storage of its weight."""

from __future__ import annotations

from dataclasses import dataclass

from compiled_kernels.linear_w8a8.mlir_rows import Int8Rows
from compiled_kernels.mlir_text import PAGES, Target, divisor, memref

MOST_ROWS = 4  # tokens whose sums are kept at once; more are more passes over weights that lie in the nearest cache
NEAR = 8192  # bytes: with blocks of weights up to this size the next block is fetched while one is read


@dataclass(frozen=True)
class Product:
    """x [rows, width] of type `x` times a weight [out, width] stored as `kind`: f32, bf16, i8 (one scale a row) or
    i4 (a scale for each `group` columns). `adds`: into what `out` holds, in place of overwriting it. `stretches`: `out`
    is that many equal runs of columns, each of which is walked for itself. `any_rows`: the number of rows is an argument,
    at least `rows`, which then is how many are walked together. `w8a8`: x comes as rows of INT8 (made of numbers of type
    `x`) and is multiplied as such with a weight of i8."""

    name: str
    rows: int
    width: int
    out: int
    kind: str
    x: str
    target: Target
    group: int = 0
    bias: bool = False
    adds: bool = False
    stretches: int = 1
    any_rows: bool = False
    w8a8: bool = False

    def __post_init__(self) -> None:
        if self.w8a8 and self.kind != "i8":
            raise ValueError(f"{self.name}: rows of INT8 are multiplied with weights of i8, not of {self.kind}")
        if self.any_rows and (self.adds or self.rows > MOST_ROWS):
            raise ValueError(f"{self.name}: any number of rows overlaps its last two runs, of {MOST_ROWS} at most")

    @property
    def stored_rows(self) -> int:
        """Return the rows of x and out as their types have them: where the number is open, a bound."""
        return PAGES if self.any_rows else self.rows

    @property
    def int8_rows(self) -> Int8Rows:
        """How x comes with `w8a8`."""
        return Int8Rows(self.width, self.x, self.target, panels=False)

    @property
    def pairs(self) -> bool:
        """Return whether sums are dot products of bfloat16 pairs."""
        fits = self.group % 32 == 0 if self.kind == "i4" else self.width % 32 == 0
        return self.target.bf16_dots and self.x == "bf16" and self.kind != "f32" and fits and not self.w8a8

    @property
    def read(self) -> int:
        """Return the numbers of x, and of a weight's row, in one vector (of a row of INT4: bytes, of two numbers
        each)."""
        if self.kind == "i4":
            return divisor(self.group // 2, 32)
        if self.w8a8:
            return self.int8_rows.values * self.lanes
        return 32 if self.pairs else divisor(self.width, self.target.lanes)

    @property
    def lanes(self) -> int:
        """Lanes of a vector of sums."""
        if self.w8a8:
            return divisor(self.width, self.target.lanes)
        return 16 if self.pairs else self.read

    @property
    def block(self) -> int:
        """Return weight rows whose sums are kept at once."""
        return divisor(self.out // self.stretches, max(1, min(4, self.target.sums // min(self.rows, MOST_ROWS))))

    @property
    def ahead(self) -> int:
        """Return the rows from one that is read to one that is fetched meanwhile; 0 where rows are so long that the
        processor prefetches by itself."""
        row_bytes = {"f32": 4.0, "bf16": 2.0, "i8": 1.0, "i4": 0.5}[self.kind] * self.width
        return self.block if self.block * row_bytes <= NEAR else 0

    @property
    def x_type(self) -> str:
        if self.w8a8:
            return self.int8_rows.type(self.stored_rows)
        return memref((self.stored_rows, self.width), self.x)

    @property
    def weight_types(self) -> tuple[str, ...]:
        """Return the memref types of the weight, its scales and its bias, as far as there are such."""
        stored = {
            "i8": (memref((self.out, self.width), "i8"), memref((self.out,), "f32")),
            "i4": (
                memref((self.out, self.width // 2), "i8"),
                memref((self.out, self.width // max(1, self.group)), "f16"),
            ),
        }.get(self.kind, (memref((self.out, self.width), self.kind),))
        return stored + ((memref((self.out,), self.x),) if self.bias else ())

    @property
    def out_type(self) -> str:
        return memref((self.stored_rows, self.out), "f32")
