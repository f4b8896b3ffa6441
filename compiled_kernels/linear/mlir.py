"""Compute products on the backend mlir, on torch's threads.

A weight in panels has a compiled function for each number of rows up to `TILE_ROWS`, whose columns the threads share,
and one for larger numbers, whose rows they share. A weight that is not in panels is converted at each call, unless it
is float32 or bfloat16: stored row by row, such a weight has a function for each number of rows below
`MAX_ROWS_TOGETHER`, and one for larger numbers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_kernels.backends import BackendError
from compiled_kernels.blocked.few import FewRows, few
from compiled_kernels.blocked.int8_rows import quantize
from compiled_kernels.blocked.layout import (
    PANEL,
    VALUES_PER_WORD,
    as_words,
    in_panels,
    regrouped,
    scales_to_panels,
    shape_of,
    to_panels,
    whole_panels,
)
from compiled_kernels.blocked.many import many
from compiled_kernels.blocked.many_rows import ManyRows, store_sums
from compiled_kernels.blocked.shape import TILE_ROWS, Panels
from compiled_kernels.builder.functions import call
from compiled_kernels.builder.target import MLIR_TYPES, SIZE_BOUND, Named, Target, memref
from compiled_kernels.builder.threads import entry, share, wait
from compiled_kernels.linear.matrix_format import SCALE_DTYPES, WORDS, MatrixFormat
from compiled_kernels.linear.rows import MAX_ROWS_TOGETHER, RowByRow, by_row
from compiled_kernels.mlir import Kernel, compile_entry
from compiled_kernels.mlir.invoke import COMPUTE_DTYPES, BoundCall, check_argument

Product = FewRows | ManyRows | RowByRow


class Weight(NamedTuple):
    """The weight of a product: its kind (see `Panels`), the number of columns that share a scale (0: all), and its
    tensors: matrix, scales, minima."""

    kind: str
    group: int
    tensors: Sequence[Tensor]

    def in_panels(self, width: int) -> Weight:
        """Return the weight with its tensors in panels. If the last group is shorter than the others, scales are
        repeated for smaller groups of equal length.
        """
        matrix, *beside = self.tensors
        if not in_panels(matrix):
            beside = [
                each if each.ndim == 1 else scales_to_panels(regrouped(each, self.group, width)) for each in beside
            ]
            matrix = to_panels(matrix)
        beside = [whole_panels(each) if each.ndim == 1 else each for each in beside]
        return Weight(self.kind, self.group and math.gcd(self.group, width), (matrix, *beside))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    (out, width), panels = shape_of(weight), in_panels(weight)
    width = width if panels else x.shape[1]
    check_argument("linear", "x", x, (len(x), width), COMPUTE_DTYPES, contiguous=False)
    if panels:
        if weight.dtype not in (x.dtype, torch.float16):
            raise BackendError(f"linear: backend mlir reads a weight in panels of {x.dtype}, not of {weight.dtype}")
    else:
        check_argument("linear", "weight", weight, (out, width), (*COMPUTE_DTYPES, torch.float16), contiguous=False)
    weights = Weight(MLIR_TYPES[weight.dtype], 0, (weight,))
    return multiply("linear", x, weights, bias, row_by_row=not panels and weight.dtype in COMPUTE_DTYPES)


def linear_quantized(
    x: Tensor, weight: Tensor, scales: Tensor, minima: Tensor | None, bias: Tensor | None, codes: str, group: int,
    activations: str,
) -> Tensor:  # fmt: skip
    tensors = [each for each in (weight, scales, minima) if each is not None]
    try:
        format = MatrixFormat.of(codes, group, scales, minima)
    except ValueError as error:
        raise BackendError(f"linear_quantized: {error}") from None
    check_stored("linear_quantized", format, tensors, shape_of(weight)[0], x.shape[1])
    if scales.ndim == 2 and scales.shape[1] == 1 and minima is None and codes in ("int8", "fp8"):
        format, tensors[1] = MatrixFormat(codes), scales[:, 0].float()
    group = min(format.group, x.shape[1])
    weights = Weight(weight_kind(format, weight.dtype), group, tensors)
    return multiply("linear_quantized", x, weights, bias, w8a8=activations == "int8")


def check_stored(name: str, format: MatrixFormat, tensors: Sequence[Tensor], out: int, width: int) -> None:
    """Raise BackendError unless `tensors` are the contiguous tensors of a matrix in this format, or of a stack of such
    matrices, row by row or in panels."""
    if problem := format.problem(width):
        raise BackendError(f"{name}: {problem} {width} columns")
    if format.words is None and format.group and math.gcd(format.group, width) % 4:
        raise BackendError(f"{name}: groups of {format.group} of {width} columns must be multiples of 4")
    (weight, *_), panels = tensors, in_panels(tensors[0])
    stack = weight.shape[: weight.ndim - (4 if panels else 2)]
    dense = {"weight": ((out, width), weight.dtype if weight.dtype in COMPUTE_DTYPES else torch.float32)}
    storage = dense if format.is_dense else format.storage(out, width)
    for tensor, (part, (shape, dtype)) in zip(tensors, storage.items(), strict=True):
        if panels and len(shape) == 2:
            values = VALUES_PER_WORD[dtype] if part == "weight" else 1
            shape = (out // PANEL, shape[1] // values, PANEL, values)
        dtypes = SCALE_DTYPES if part != "weight" and format.group and not format.words else (dtype,)
        check_argument(name, part, tensor, (*stack, *shape), dtypes, contiguous=panels)


def weight_kind(format: MatrixFormat, dtype: torch.dtype) -> str:
    """Return the kind (see blocked/shape.py) of a weight in this format; a dense weight has the kind of its `dtype`."""
    if format.is_dense:
        return MLIR_TYPES[dtype]
    kinds = {"int8": "i8", "fp8": "f8", "float16": "f16", "int4": "i4" if format.minima is None else "u4"}
    return kinds.get(format.codes, format.codes)


def multiply(
    name: str, x: Tensor, weight: Weight, bias: Tensor | None, row_by_row: bool = False, w8a8: bool = False
) -> Tensor:
    """Multiply x [token, width] by a weight, in the type of x; with `w8a8` x is quantized to INT8."""
    tokens, width = x.shape
    check_argument(name, "x", x, (tokens, width), COMPUTE_DTYPES, contiguous=False)
    matrix, *beside = weight.tensors
    out = len(matrix) * (PANEL if in_panels(matrix) else 1)
    if bias is not None:
        check_argument(name, "bias", bias, (out,), (bias.dtype,), contiguous=False)
        bias = bias.to(x.dtype)
    if not tokens or not out:
        return x.new_empty(tokens, out)
    if not row_by_row:
        if missing := 0 if in_panels(matrix) else -width % VALUES_PER_WORD[matrix.dtype]:  # half a word is filled up
            x, matrix, width = F.pad(x, (0, missing)), F.pad(matrix, (0, missing)), width + missing
        weight = weight._replace(tensors=(matrix, *beside)).in_panels(width)
        matrix, *beside = weight.tensors
        bias = None if bias is None else whole_panels(bias)
    scales = [MLIR_TYPES[each.dtype] for each in beside]
    of = width, out, weight.kind, MLIR_TYPES[x.dtype], bias is not None, weight.group, *scales
    kernel, product = _compiled(Target.current(), rows_compiled(tokens, row_by_row), row_by_row, w8a8, *of)
    words = matrix.contiguous() if row_by_row else as_words(matrix)
    given = [words, *(each.contiguous() for each in beside), *([] if bias is None else [bias.contiguous()])]
    room = []
    if isinstance(product, Panels) and w8a8:
        room.append(torch.empty(tokens, product.int8_rows.row, dtype=torch.int32))
    many = isinstance(product, ManyRows)
    entering = x.to(torch.float32) if isinstance(product, ManyRows) and product.multiplied_dtype == "f32" else x
    found = torch.empty(tokens, out, dtype=x.dtype if many else torch.float32)
    BoundCall(kernel.address, (entering.contiguous(), *room, *given, found, torch.tensor([tokens])))()
    return found.to(x.dtype)


def rows_compiled(tokens: int, row_by_row: bool) -> int:
    """Return the number of rows that the code for `tokens` rows is compiled for; 0 if this number of rows runs the
    function for any number of rows.
    """
    return tokens if tokens <= (MAX_ROWS_TOGETHER - 1 if row_by_row else TILE_ROWS) else 0


@functools.lru_cache(maxsize=512)
def _compiled(
    target: Target, tokens: int, row_by_row: bool, w8a8: bool, width: int, out: int, kind: str, x: str, bias: bool,
    group: int = 0, scales: str = "f16", minima: str = "",
) -> tuple[Kernel, Product]:  # fmt: skip
    """Compile @linear(x, [x in INT8,] weight, scales, minima, bias, out, (rows))."""
    sizes = ("product", width, out, kind, x, target, bias)
    beside = {"quant_group": 0 if kind in WORDS else group, "scales": scales, "minima": "" if kind in WORDS else minima}
    beside |= {"w8a8": w8a8}
    if row_by_row:
        product: Product = RowByRow(
            "product", tokens or MAX_ROWS_TOGETHER, width, out, kind, x, target, bias, any_rows=not tokens
        )
    else:
        product = FewRows(*sizes, tokens, **beside) if tokens else ManyRows(*sizes, out_dtype=x, **beside)
    return compile_entry("linear", target.level, lambda: _kernel(product, tokens)), product


def _kernel(product: Product, tokens: int) -> None:
    """Build the product's functions and the entry that all threads run: they share the rows to quantize, wait for one
    another, and share the product's columns, or for many rows in panels its rows."""
    if isinstance(product, ManyRows):
        many(product, store_sums)
    elif isinstance(product, FewRows):
        few(product)
    else:
        by_row(product)
    weights = (Named(f"w{i}", kind) for i, kind in enumerate(product.weight_types))
    passed = [Named("x", product.x_type), *weights, Named("out", product.out_type)]
    floats = Named("floats", memref((tokens or SIZE_BOUND, product.in_features), product.x_dtype))
    if not isinstance(product, RowByRow) and product.w8a8:
        quantize("quantize", product.int8_rows, tokens or SIZE_BOUND)
    with entry("linear", [*[floats] * product.w8a8, *passed, Named("sizes", "memref<1xi64>")]) as given:
        rows = given["sizes"][0].to("index")
        if product.w8a8:
            call("quantize", [given["floats"], given["x"], *share(given, rows, 1)])
            wait()
        by_rows = isinstance(product, ManyRows)
        divided = (rows, TILE_ROWS) if by_rows else (product.out_features, product.block)
        bounds = [*share(given, *divided), *[rows] * (not tokens)]
        call("product", [*(given[each.name] for each in passed), *bounds])
