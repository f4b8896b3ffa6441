"""The backend mlir of the products, run on torch's threads.

A weight in panels (one that is not is laid out so at each call, unless it is float32 or bfloat16) has a compiled
function for each number of rows up to `TILE_ROWS`, whose columns the threads share, and one for all others, whose rows
they share. One of float32 or bfloat16 row by row has one for each number of rows below `MAX_ROWS_TOGETHER`, and one for
all others.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_kernels.backends import BackendError
from compiled_kernels.blocked.few import FewRows, few
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
from compiled_kernels.blocked.many import ManyRows, many, store_sums
from compiled_kernels.blocked.shape import TILE_ROWS, Panels
from compiled_kernels.builder.functions import call, text_of
from compiled_kernels.builder.target import MLIR_TYPES, SIZE_BOUND, Named, Target, memref
from compiled_kernels.builder.threads import entry, share, wait
from compiled_kernels.cases import Case
from compiled_kernels.linear.matrix_format import SCALE_DTYPES, WORDS, MatrixFormat
from compiled_kernels.linear.rows import MAX_ROWS_TOGETHER, RowByRow, by_row
from compiled_kernels.linear_w8a8.mlir_rows import quantize
from compiled_kernels.mlir import Kernel, compile_text
from compiled_kernels.mlir.invoke import COMPUTE_DTYPES, BoundCall, check_argument, libgomp_path

Product = FewRows | ManyRows | RowByRow
INT8_ROWS = "linear_w8a8"


class Weight(NamedTuple):
    """A weight of a product: its kind as `Panels` has it and the columns that share a scale (0: all), then its tensors:
    the matrix, its scales, its minima."""

    kind: str
    group: int
    tensors: Sequence[Tensor]

    def in_panels(self, width: int) -> Weight:
        """Return it laid out in panels: a last group that is not whole becomes one of as many as divide all."""
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


def linear_int8(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    return multiply("linear_int8", x, _int8("linear_int8", x, values, scales), bias)


def linear_w8a8(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, minima: Tensor | None, codes: str, group: int
) -> Tensor:
    if codes in WORDS:
        weights = _in_words(INT8_ROWS, x, weight, scales, minima, codes)
    elif group:
        weights = _grouped(INT8_ROWS, x, weight, scales, minima, group)
    else:
        weights = _int8(INT8_ROWS, x, weight, scales)
    return multiply(INT8_ROWS, x, weights, bias)


def _int8(name: str, x: Tensor, values: Tensor, scales: Tensor) -> Weight:
    out, width = shape_of(values)
    width = width if in_panels(values) else x.shape[1]
    check_argument(name, "x", x, (len(x), width), COMPUTE_DTYPES, contiguous=False)
    sizes = (*values.shape[:2], PANEL, 4) if in_panels(values) else (out, width)
    check_argument(name, "values", values, sizes, (torch.int8,), contiguous=in_panels(values))
    check_argument(name, "scales", scales, (out,), (torch.float32,), contiguous=False)
    return Weight("i8", 0, (values, scales))


def linear_grouped(
    x: Tensor, codes: Tensor, scales: Tensor, minima: Tensor | None, bias: Tensor | None, group: int
) -> Tensor:
    weight = _grouped("linear_grouped", x, codes, scales, minima, group)
    if scales.ndim == 2 and scales.shape[1] == 1 and minima is None and codes.dtype != torch.int32:
        weight = Weight(weight.kind, 0, (codes, scales[:, 0].float()))
    return multiply("linear_grouped", x, weight, bias)


def _grouped(name: str, x: Tensor, codes: Tensor, scales: Tensor, minima: Tensor | None, group: int) -> Weight:
    width, panels = x.shape[1], in_panels(codes)
    kinds = {torch.int32: "i4" if minima is None else "u4", torch.int8: "i8", torch.float8_e4m3fn: "f8"}
    if (kind := kinds.get(codes.dtype)) is None:
        raise BackendError(f"{name}: backend mlir wants codes as int32, int8 or float8_e4m3fn; {codes.dtype} given")
    per_word = 8 if codes.dtype == torch.int32 else 4
    if group < 1 or math.gcd(group, width) % per_word or (per_word == 8 and width % group):
        wanted = f"groups of whole words that divide {width} columns are wanted"
        raise BackendError(f"{name}: {wanted}, {group} given")
    values = 1 if per_word == 8 else 4  # of a word, as the tensor has it
    stored = width // 8 if per_word == 8 else width
    sizes = (len(codes), stored // values, PANEL, values) if panels else (len(codes), stored)
    check_argument(name, "codes", codes, sizes, (codes.dtype,), contiguous=panels)
    groups = (len(scales), -(-width // group))
    for part, tensor in (("scales", scales), ("minima", minima)):
        if tensor is not None:
            wanted = (len(codes), groups[1], PANEL, 1) if tensor.ndim == 4 else groups
            check_argument(name, part, tensor, wanted, SCALE_DTYPES, contiguous=False)
    return Weight(kind, min(group, width), (codes, scales, *([] if minima is None else [minima])))


def weight_kind(format: MatrixFormat, dtype: torch.dtype) -> str:
    """Return the kind of a weight (see blocked/shape.py) that is stored so; of a dense one that of its `dtype`."""
    if format.is_dense:
        return MLIR_TYPES[dtype]
    kinds = {"int8": "i8", "fp8": "f8", "float16": "f16", "int4": "i4" if format.minima is None else "u4"}
    return kinds.get(format.codes, format.codes)


def linear_quantized(
    x: Tensor, weight: Tensor, scales: Tensor, minima: Tensor | None, bias: Tensor | None, format: str
) -> Tensor:
    return multiply("linear_quantized", x, _in_words("linear_quantized", x, weight, scales, minima, format), bias)


def _in_words(name: str, x: Tensor, weight: Tensor, scales: Tensor, minima: Tensor | None, format: str) -> Weight:
    width = x.shape[1]
    if problem := MatrixFormat.named(format).problem(width):
        raise BackendError(f"{name}: {problem} {width} columns")
    words = WORDS[format]
    row, panels = words.row_words(width), in_panels(weight)
    sizes = (len(weight), row, PANEL, 1) if panels else (len(weight), row)
    check_argument(name, "weight", weight, sizes, (torch.int32,), contiguous=panels)
    groups = width // words.scale_columns
    tensors, dtypes = [weight, scales, *([] if minima is None else [minima])], (words.scales, torch.float16)
    for part, tensor, dtype in zip(("scales", "minima"), tensors[1:], dtypes, strict=False):
        sizes = (len(weight), groups, PANEL, 1) if panels else (len(weight), groups)
        check_argument(name, part, tensor, sizes, (dtype,), contiguous=panels)
    return Weight(format, words.group, tensors)


def multiply(name: str, x: Tensor, weight: Weight, bias: Tensor | None, row_by_row: bool = False) -> Tensor:
    """Multiply x [token, width] by a weight, in the type of x."""
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
    of = (name, width, out, weight.kind, MLIR_TYPES[x.dtype], bias is not None, weight.group if scales else 0, *scales)
    kernel, product = _compiled(Target.current(), rows_compiled(tokens, row_by_row), row_by_row, *of)
    words = matrix.contiguous() if row_by_row else as_words(matrix)
    given = [words, *(each.contiguous() for each in beside), *([] if bias is None else [bias.contiguous()])]
    room = []
    if isinstance(product, Panels) and product.w8a8:
        room.append(torch.empty(tokens, product.int8_rows.row, dtype=torch.int32))
    many = isinstance(product, ManyRows)
    entering = x.to(torch.float32) if isinstance(product, ManyRows) and product.multiplied_dtype == "f32" else x
    found = torch.empty(tokens, out, dtype=x.dtype if many else torch.float32)
    BoundCall(kernel.address, (entering.contiguous(), *room, *given, found, torch.tensor([tokens])))()
    return found.to(x.dtype)


def rows_compiled(tokens: int, row_by_row: bool) -> int:
    """Return the number of rows that code is compiled for: 0 stands for any number from where one function serves
    all."""
    return tokens if tokens <= (MAX_ROWS_TOGETHER - 1 if row_by_row else TILE_ROWS) else 0


@functools.lru_cache(maxsize=512)
def _compiled(
    target: Target, tokens: int, row_by_row: bool, name: str, width: int, out: int, kind: str, x: str, bias: bool,
    group: int, scales: str = "f16", minima: str = "",
) -> tuple[Kernel, Product]:  # fmt: skip
    """Compile @{name}(x, [x in INT8,] weight, scales, minima, bias, out, (rows))."""
    sizes = ("product", width, out, kind, x, target, bias)
    beside = {"quant_group": 0 if kind in WORDS else group, "scales": scales, "minima": "" if kind in WORDS else minima}
    beside |= {"w8a8": name == INT8_ROWS}
    if row_by_row:
        product: Product = RowByRow(
            "product", tokens or MAX_ROWS_TOGETHER, width, out, kind, x, target, bias, any_rows=not tokens
        )
    else:
        product = FewRows(*sizes, tokens, **beside) if tokens else ManyRows(*sizes, out_dtype=x, **beside)
    text = text_of(lambda: _kernel(product, name, tokens))
    return compile_text(text, name, level=target.level, libraries=(libgomp_path(),)), product


def _kernel(product: Product, name: str, tokens: int) -> None:
    """Make the product's functions and the entry, run by all threads at once: they share the rows to quantize, wait for
    one another, and share the columns or (many, in panels) the rows of the product."""
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
    with entry(name, [*[floats] * product.w8a8, *passed, Named("sizes", "memref<1xi64>")]) as given:
        rows = given["sizes"][0].to("index")
        if product.w8a8:
            call("quantize", [given["floats"], given["x"], *share(given, rows, 1)])
            wait()
        by_rows = isinstance(product, ManyRows)
        divided = (rows, TILE_ROWS) if by_rows else (product.out_features, product.block)
        bounds = [*share(given, *divided), *[rows] * (not tokens)]
        call("product", [*(given[each.name] for each in passed), *bounds])


def stages(case: Case, operator: str = "linear") -> Mapping[str, str]:
    """Return every stage of the function that runs for `case`."""
    of = case.arguments
    dense = MLIR_TYPES[of["dtype"]]
    stored = of.get("weight_dtype", of["dtype"])
    row_by_row = operator == "linear" and not of.get("panels") and stored in COMPUTE_DTYPES
    kind, group, beside = MLIR_TYPES[stored], 0, []
    if of.get("format") in WORDS:
        kind, group = of["format"], WORDS[of["format"]].group
        beside = [MLIR_TYPES[WORDS[kind].scales], *["f16"] * WORDS[kind].minima]
    elif of.get("format") == "int4":
        kind, group, beside = "i4", 64, ["f16"]
    elif operator in ("linear_int8", INT8_ROWS):
        kind, beside = "i8", ["f32"]
    elif operator == "linear_grouped":
        minima = of["minima"]
        kind = weight_kind(MatrixFormat(of["codes"], of["group"], of["scales"], minima), of["dtype"])
        if of["group"] < of["width"] or minima is not None or kind in ("i4", "u4"):
            group = min(of["group"], of["width"])
            beside = [MLIR_TYPES[each] for each in (of["scales"], minima) if each is not None]
        else:
            beside = ["f32"]
    tokens, width = rows_compiled(of["tokens"], row_by_row), of["width"]
    width += -width % 4 if kind in ("i8", "f8") else 0  # as in panels
    shape = operator, width, of["out"], kind, dense, of["bias"], math.gcd(group, width) if group else 0, *beside
    return _compiled(Target.current(), tokens, row_by_row, *shape)[0].stages
