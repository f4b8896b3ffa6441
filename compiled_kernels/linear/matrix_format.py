"""The ways in which a matrix is stored: dense, or as codes of few bits with scales, and minima where there are such."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

Codes = Literal["dense", "int8", "int4", "fp8"]
CODE_DTYPES = {"int8": torch.int8, "int4": torch.uint8, "fp8": torch.float8_e4m3fn}
SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class MatrixFormat:
    """Describe how a matrix [out, in] is stored. In few bits a value is `code * scale + minimum`.

    Args:
        codes: `dense`: in the model's type. `int8`: -128..127. `int4`: -8..7, beside minima 0..15; two a byte (see
            `pack_int4`). `fp8`: float8_e4m3fn, without NaN.
        group: columns that share a scale and a minimum; of the last group fewer may be left. 0 is a whole row.
        scales: their type: [out, group], of whole rows float32 [out].
        minima: their type, [out, group]; None where there are none.
    """

    codes: Codes = "dense"
    group: int = 0
    scales: torch.dtype = torch.float32
    minima: torch.dtype | None = None

    def __post_init__(self) -> None:
        by_row = not self.group
        if by_row and (self.codes == "int4" or self.minima is not None or self.scales != torch.float32):
            raise ValueError(f"{self}: a scale for a whole row is float32, of int8 or fp8, without a minimum")
        if self.codes == "int4" and self.group % 2:
            raise ValueError(f"{self}: groups of 4 bits are even")
        if self.codes == "fp8" and self.minima is not None:
            raise ValueError(f"{self}: there are no minima beside fp8")

    def __str__(self) -> str:
        words = [self.codes, *([f"by {self.group}"] if self.group else [])]
        return " ".join([*words, *(["with minima"] if self.minima is not None else [])])

    @property
    def is_dense(self) -> bool:
        return self.codes == "dense"

    @property
    def scales_rows(self) -> bool:
        """Return whether a row has one scale, which multiplies the row's sum of products."""
        return not self.is_dense and not self.group

    def num_groups(self, columns: int) -> int:
        return -(-columns // (self.group or columns))

    def storage(self, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shapes and types of codes, scales and minima, as far as there are such, of a matrix in few bits."""
        groups = (rows, self.num_groups(columns)) if self.group else (rows,)
        width = columns // 2 if self.codes == "int4" else columns
        found = {"weight": ((rows, width), CODE_DTYPES[self.codes]), "scales": (groups, self.scales)}
        return found if self.minima is None else {**found, "minima": (groups, self.minima)}

    def nbytes(self, rows: int, columns: int) -> int:
        """Return the bytes of a matrix in few bits, scales and minima included."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.storage(rows, columns).values())

    def problem(self, columns: int) -> str | None:
        """Return why a matrix of so many columns cannot be stored so; None where it can."""
        if self.codes == "int4" and columns % self.group:
            return f"INT4 groups of {self.group} do not divide"
        return None


DENSE_MATRIX = MatrixFormat()
INT8_MATRIX = MatrixFormat("int8")
