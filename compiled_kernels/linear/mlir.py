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
from compiled_kernels.linear.mlir_shape import MAX_ROWS_TOGETHER, Product
from compiled_kernels.linear.mlir_text import product_text
from compiled_kernels.mlir import Kernel, compile_text
from compiled_kernels.mlir.invoke import COMPUTE_DTYPES, BoundCall, check_argument, libgomp_path
from compiled_kernels.mlir_text import MLIR_TYPES, THREADS, Named, Target, call, declare_arguments


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if in_panels(weight):
        return blocked.linear("linear", x, weight, None, bias)
    tokens, width = x.shape
    check_argument("linear", "x", x, (tokens, width), COMPUTE_DTYPES, contiguous=False)
    check_argument("linear", "weight", weight, (weight.shape[0], width), COMPUTE_DTYPES, contiguous=False)
    return _run(x, "linear", MLIR_TYPES[weight.dtype], 0, (weight,), bias)


def linear_int8(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    if in_panels(values):
        return blocked.linear("linear_int8", x, values, scales, bias)
    tokens, width = x.shape
    check_argument("linear_int8", "x", x, (tokens, width), COMPUTE_DTYPES, contiguous=False)
    check_argument("linear_int8", "values", values, (values.shape[0], width), (torch.int8,), contiguous=False)
    check_argument("linear_int8", "scales", scales, (values.shape[0],), (torch.float32,), contiguous=False)
    return _run(x, "linear_int8", "i8", 0, (values, scales), bias)


def linear_int4(x: Tensor, packed: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    (tokens, width), (out, groups) = x.shape, scales.shape
    check_argument("linear_int4", "x", x, (tokens, width), COMPUTE_DTYPES, contiguous=False)
    check_argument("linear_int4", "packed", packed, (out, width // 2), (torch.uint8,), contiguous=False)
    check_argument("linear_int4", "scales", scales, (out, groups), (torch.float16,), contiguous=False)
    if groups < 1 or width % (2 * groups):
        raise BackendError(f"linear_int4: {groups} scales a row do not divide {width} columns into even groups")
    return _run(x, "linear_int4", "i4", width // groups, (packed, scales), bias)


def stages(case: Case, operator: str = "linear") -> Mapping[str, str]:
    """Return every stage of the function that runs for `case`."""
    of = case.arguments
    kind = {"linear_int8": "i8", "linear_int4": "i4"}.get(operator, MLIR_TYPES[of["dtype"]])
    if of.get("panels"):
        shape = of["width"], of["out"], kind, MLIR_TYPES[of["dtype"]], of["bias"]
        few = of["tokens"] <= TILE_ROWS
        return (
            blocked.few_rows(Target.current(), operator, of["tokens"], *shape)
            if few
            else blocked.many_rows(Target.current(), operator, *shape)[0]
        ).stages
    shape = (min(of["tokens"], MAX_ROWS_TOGETHER), of["width"], of["out"])
    return _compiled(
        Target.current(), operator, *shape, kind, MLIR_TYPES[of["dtype"]], of.get("group", 0), of["bias"]
    ).stages


def _run(x: Tensor, name: str, kind: str, group: int, weights: tuple[Tensor, ...], bias: Tensor | None) -> Tensor:
    (tokens, width), outs = x.shape, weights[0].shape[0]
    out = torch.empty(tokens, outs)
    if not out.numel():
        return out.to(x.dtype)
    if bias is not None:
        check_argument(name, "bias", bias, (outs,), (bias.dtype,), contiguous=False)
        weights = (*weights, bias.to(x.dtype))
    rows = min(tokens, MAX_ROWS_TOGETHER)
    kernel = _compiled(Target.current(), name, rows, width, outs, kind, MLIR_TYPES[x.dtype], group, bias is not None)
    sizes = torch.tensor([tokens])
    BoundCall(kernel.address, (x.contiguous(), *(weight.contiguous() for weight in weights), out, sizes))()
    return out.to(x.dtype)


@functools.lru_cache(maxsize=512)
def _compiled(
    target: Target, name: str, rows: int, width: int, out: int, kind: str, x: str, group: int, bias: bool
) -> Kernel:
    product = Product("product", rows, width, out, kind, x, target, group, bias, any_rows=rows == MAX_ROWS_TOGETHER)
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
