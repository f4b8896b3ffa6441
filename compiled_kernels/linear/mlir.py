"""The backend mlir of the products, run on torch's threads: one compiled function for each matrix shape and each number
of rows below `MAX_ROWS_TOGETHER`, and one for all other numbers. A weight in panels has products of its own
(compiled_kernels/blocked)."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from compiled_kernels.backends import BackendError
from compiled_kernels.blocked import in_panels
from compiled_kernels.blocked import mlir as blocked
from compiled_kernels.blocked.shape import TILE_ROWS
from compiled_kernels.cases import Case
from compiled_kernels.linear.matrix_format import CODE_DTYPES, SCALE_DTYPES
from compiled_kernels.linear.mlir_codes import CODE_BITS, code_kind
from compiled_kernels.linear.mlir_shape import MAX_ROWS_TOGETHER, Product
from compiled_kernels.linear.mlir_text import product_text
from compiled_kernels.linear.planes import unpack_planes
from compiled_kernels.mlir import Kernel, compile_text
from compiled_kernels.mlir.invoke import COMPUTE_DTYPES, BoundCall, check_argument, libgomp_path
from compiled_kernels.mlir_text import MLIR_TYPES, THREADS, Named, Target, call, declare_arguments


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if in_panels(weight):
        return blocked.linear("linear", x, weight, None, bias)
    tokens, width = x.shape
    check_argument("linear", "x", x, (tokens, width), COMPUTE_DTYPES, contiguous=False)
    check_argument("linear", "weight", weight, (weight.shape[0], width), COMPUTE_DTYPES, contiguous=False)
    return _run(x, "linear", MLIR_TYPES[weight.dtype], (weight,), bias)


def linear_int8(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    if in_panels(values):
        return blocked.linear("linear_int8", x, values, scales, bias)
    tokens, width = x.shape
    check_argument("linear_int8", "x", x, (tokens, width), COMPUTE_DTYPES, contiguous=False)
    check_argument("linear_int8", "values", values, (values.shape[0], width), (torch.int8,), contiguous=False)
    check_argument("linear_int8", "scales", scales, (values.shape[0],), (torch.float32,), contiguous=False)
    return _run(x, "linear_int8", "i8", (values, scales), bias)


def linear_grouped(
    x: Tensor, codes: Tensor, scales: Tensor, minima: Tensor | None, bias: Tensor | None, group: int
) -> Tensor:
    name, (tokens, width), out = "linear_grouped", x.shape, codes.shape[0]
    kind, four = code_kind(codes.dtype, minima is not None), codes.dtype == torch.int32
    check_argument(name, "x", x, (tokens, width), COMPUTE_DTYPES, contiguous=False)
    check_argument(name, "codes", codes, (out, width // 8 if four else width), (codes.dtype,), contiguous=False)
    groups = -(-width // max(1, group))
    if group < 1 or (four and (group % 8 or width % group)):
        raise BackendError(f"{name}: groups of whole words that divide {width} columns are wanted, {group} given")
    check_argument(name, "scales", scales, (out, groups), SCALE_DTYPES, contiguous=False)
    if minima is not None:
        check_argument(name, "minima", minima, (out, groups), SCALE_DTYPES, contiguous=False)
    by_row = groups == 1 and minima is None and not four
    codes = halves(codes, group) if four else codes
    weights = (codes, scales[:, 0].float() if by_row else scales, *([] if minima is None else [minima]))
    types = MLIR_TYPES[scales.dtype], "" if minima is None else MLIR_TYPES[minima.dtype]
    return _run(x, name, kind, weights, bias, *([] if by_row else [group, *types]))


def halves(words: Tensor, group: int) -> Tensor:
    """Return words of INT4 as bytes of a column of a group's first half and one of its second: until panels hold them,
    these kernels read such."""
    low, high = unpack_planes(words, (4,)).unflatten(-1, (-1, 2, group // 2)).unbind(-2)
    return (low | high << 4).flatten(1)


def stages(case: Case, operator: str = "linear") -> Mapping[str, str]:
    """Return every stage of the function that runs for `case`."""
    of = case.arguments
    kind = {"linear_int8": "i8"}.get(operator, MLIR_TYPES[of["dtype"]])
    if of.get("panels"):
        shape = of["width"], of["out"], kind, MLIR_TYPES[of["dtype"]], of["bias"]
        few = of["tokens"] <= TILE_ROWS
        return (
            blocked.few_rows(Target.current(), operator, of["tokens"], *shape)
            if few
            else blocked.many_rows(Target.current(), operator, *shape)[0]
        ).stages
    shape = (min(of["tokens"], MAX_ROWS_TOGETHER), of["width"], of["out"])
    codes: tuple[str | int, ...] = ()
    if operator == "linear_grouped":
        minima = of["minima"]
        kind = code_kind(CODE_DTYPES[of["codes"]], minima is not None)
        if of["group"] < of["width"] or minima is not None or CODE_BITS[kind] == 4:
            types = MLIR_TYPES[of["scales"]], "" if minima is None else MLIR_TYPES[minima]
            codes = (min(of["group"], of["width"]), *types)
    return _compiled(Target.current(), operator, *shape, kind, MLIR_TYPES[of["dtype"]], of["bias"], *codes).stages


def _run(
    x: Tensor, name: str, kind: str, weights: tuple[Tensor, ...], bias: Tensor | None, *codes: str | int
) -> Tensor:
    """Multiply by `weights`, a matrix and what is beside it; `codes` are group and types of scales
    and minima, unless rows are scaled."""
    (tokens, width), outs = x.shape, weights[0].shape[0]
    out = torch.empty(tokens, outs)
    if not out.numel():
        return out.to(x.dtype)
    if bias is not None:
        check_argument(name, "bias", bias, (outs,), (bias.dtype,), contiguous=False)
        weights = (*weights, bias.to(x.dtype))
    rows = min(tokens, MAX_ROWS_TOGETHER)
    kernel = _compiled(Target.current(), name, rows, width, outs, kind, MLIR_TYPES[x.dtype], bias is not None, *codes)
    sizes = torch.tensor([tokens])
    BoundCall(kernel.address, (x.contiguous(), *(weight.contiguous() for weight in weights), out, sizes))()
    return out.to(x.dtype)


@functools.lru_cache(maxsize=512)
def _compiled(
    target: Target, name: str, rows: int, width: int, out: int, kind: str, x: str, bias: bool,
    group: int = 0, scales: str = "f32", minima: str = "",
) -> Kernel:  # fmt: skip
    product = Product(
        "product", rows, width, out, kind, x, target, group, bias, any_rows=rows == MAX_ROWS_TOGETHER,
        scales=scales, minima=minima,
    )  # fmt: skip
    text = "\n".join((THREADS, product_text(product), _entry(product, name)))
    return compile_text(text, name, level=target.level, libraries=(libgomp_path(),))


def _entry(product: Product, name: str) -> str:
    """Emit @{name}(x, weight, scales, bias, out, (rows)): run by all threads at once, each of which takes a share of
    the columns."""
    weights = (Named(f"w{i}", kind) for i, kind in enumerate(product.weight_types))
    arguments = [Named("x", product.x_type), *weights, Named("out", product.out_type)]
    bounds = [Named("begin", "index"), Named("end", "index"), *([Named("rows", "index")] if product.any_rows else [])]
    return f"""func.func @{name}({declare_arguments([*arguments, Named("sizes", "memref<1xi64>")])}) {{
  %zero = arith.constant 0 : index
  %rows64 = memref.load %sizes[%zero] : memref<1xi64>
  %rows = arith.index_cast %rows64 : i64 to index
  %thread, %threads = call @thread() : () -> (index, index)
  %count = arith.constant {product.out_features} : index
  %unit = arith.constant {product.block} : index
  %begin, %end = call @share(%count, %unit, %thread, %threads) : (index, index, index, index) -> (index, index)
  {call("product", [*arguments, *bounds])}
  return
}}"""
