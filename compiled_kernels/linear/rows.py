"""Multiply a few rows by a dense weight stored row by row: each weight is read once for all rows, at memory bandwidth.

The weight's rows are processed in blocks; a block's sums stay in registers, one vector for each pair of weight row and
token, and are added across the vector in the end. Weights that torch multiplies at prefill are stored this way; other
weights are stored in panels (see blocked/).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compiled_kernels.builder.functions import function, loop
from compiled_kernels.builder.target import SIZE_BOUND, Named, Target, indices, largest_divisor, memref
from compiled_kernels.builder.values import Value, constant, fma
from compiled_kernels.builder.vectors import dot_pairs, total, totals

# tokens with sums in registers at once; further tokens read the weights again, from the nearest cache
MAX_ROWS_TOGETHER = 4
PREFETCH_BLOCK_BYTES = 8192  # bytes: with blocks of weights up to this size the next block is fetched while one is read
BITS = {"f32": 32, "bf16": 16}


@dataclass(frozen=True)
class RowByRow:
    """The product of x [rows, width] of type `x_dtype` and a weight [out, width] stored as `weight_dtype`, f32 or bf16.

    `accumulate`: add to `out` instead of overwriting it. `segments`: `out` consists of this many equal runs of columns,
    processed separately. `any_rows`: the number of rows is an argument, at least `rows`, the number processed together.
    """

    name: str
    rows: int
    in_features: int
    out_features: int
    weight_dtype: str
    x_dtype: str
    target: Target
    bias: bool = False
    accumulate: bool = False
    segments: int = 1
    any_rows: bool = False
    w8a8 = False

    def __post_init__(self) -> None:
        if self.weight_dtype not in BITS:
            raise ValueError(f"{self.name}: a weight of {self.weight_dtype} is only supported in panels")
        if self.any_rows and (self.accumulate or self.rows > MAX_ROWS_TOGETHER):
            raise ValueError(
                f"{self.name}: any_rows needs runs of at most {MAX_ROWS_TOGETHER} rows, without accumulate"
            )

    @property
    def uses_bf16_pairs(self) -> bool:
        """Return whether sums are dot products of bfloat16 pairs."""
        both = self.x_dtype == self.weight_dtype == "bf16"
        return self.target.has_bf16_dot and both and self.in_features % 32 == 0

    @property
    def values(self) -> int:
        """Return the number of values in a vector, of x or of a row of the weight."""
        return 32 if self.uses_bf16_pairs else largest_divisor(self.in_features, self.target.lanes)

    @property
    def block(self) -> int:
        """Return the number of weight rows whose sums are in registers at once."""
        together = min(self.rows, MAX_ROWS_TOGETHER)
        most = max(1, min(4, self.target.accumulators // together))
        return largest_divisor(self.out_features // self.segments, most)

    @property
    def prefetch_rows(self) -> int:
        """Return the number of rows between the row that is read and the row that is prefetched; 0 if rows are so long
        that the processor prefetches by itself."""
        row_bytes = self.in_features * BITS[self.weight_dtype] // 8
        return self.block if self.block * row_bytes <= PREFETCH_BLOCK_BYTES else 0

    @property
    def x_type(self) -> str:
        return memref((SIZE_BOUND if self.any_rows else self.rows, self.in_features), self.x_dtype)

    @property
    def weight_types(self) -> tuple[str, ...]:
        """Return the memref types of the weight, and of its bias if there is one."""
        bias = (memref((self.out_features,), self.x_dtype),) if self.bias else ()
        return (memref((self.out_features, self.in_features), self.weight_dtype), *bias)

    @property
    def out_type(self) -> str:
        return memref((SIZE_BOUND if self.any_rows else self.rows, self.out_features), "f32")


def by_row(product: RowByRow) -> None:
    """Build the function @name(x [rows, width], weight, bias (see `weight_types`), out [rows, out] f32, begin, end[,
    rows]), which computes the output columns from begin to end, both multiples of `block`. Only with `any_rows` is
    there a last argument, the number of rows of x."""
    weights = [Named(f"w{i}", kind) for i, kind in enumerate(product.weight_types)]
    bounds = indices("begin", "end", *["rows"] * product.any_rows)
    arguments = [Named("x", product.x_type), *weights, Named("out", product.out_type), *bounds]
    with (
        function(product.name, arguments, inline=False) as given,
        loop(given["begin"], given["end"], product.block) as turn,
    ):
        if product.any_rows:  # process runs of equal length; the last run begins early enough to have it as well
            with loop(0, given["rows"], product.rows) as run:
                first = run.index.minimum(given["rows"] - product.rows)
                _block(product, given, turn.index, [first + i for i in range(product.rows)])
        else:
            for first in range(0, product.rows, MAX_ROWS_TOGETHER):
                tokens = range(first, min(first + MAX_ROWS_TOGETHER, product.rows))
                _block(product, given, turn.index, [turn.index.like(token) for token in tokens])


def _block(product: RowByRow, given: dict[str, Value], column: Value, tokens: Sequence[Value]) -> None:
    """Process the block of weight rows that begins with `column`, for these tokens; sums are in order (row, token)."""
    pairs, lanes = product.uses_bf16_pairs, 16 if product.uses_bf16_pairs else product.values
    rows = [column + i for i in range(product.block)]

    def numbers(memory: Value, row: Value, at: Value) -> Value:
        found = memory.load(product.values, row, at)
        return found if pairs else found.to("f32")

    with loop(0, product.in_features, product.values, [constant(0.0, "f32", lanes)] * (len(rows) * len(tokens))) as k:
        if product.prefetch_rows:  # after a short row, the next row follows in memory
            for row in rows:
                given["w0"].prefetch(row + product.prefetch_rows, k.index)
        weights = [numbers(given["w0"], row, k.index) for row in rows]
        x, carried = [numbers(given["x"], token, k.index) for token in tokens], iter(k.carried)
        k.carry([
            dot_pairs(next(carried), weight, each) if pairs else fma(weight, each, next(carried))
            for weight in weights for each in x
        ])  # fmt: skip
    whole = len(k.results) == lanes > 1
    folded = totals(k.results) if whole else None
    found = [folded.at(i) for i in range(lanes)] if folded else [total(each) for each in k.results]
    for i, row in enumerate(rows):
        bias = given["w1"][row].to("f32") if product.bias else None
        for value, token in zip(found[i * len(tokens) :], tokens, strict=False):
            value = value if bias is None else value + bias
            given["out"][token, row] = given["out"][token, row] + value if product.accumulate else value
