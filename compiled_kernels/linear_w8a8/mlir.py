"""The backend mlir of the product, run on torch's threads: they share the rows to quantize, wait for one another, and
share the columns (few rows, or a weight row by row) or the rows (many, a weight in panels) of the product."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from compiled_kernels.blocked.few import FewRows, few_text
from compiled_kernels.blocked.layout import PANEL, VALUES_PER_WORD, as_words, in_panels, shape_of
from compiled_kernels.blocked.many import ManyRows, many_text, store_sums
from compiled_kernels.blocked.shape import TILE_ROWS
from compiled_kernels.cases import Case
from compiled_kernels.linear.mlir_shape import MAX_ROWS_TOGETHER, Product
from compiled_kernels.linear.mlir_text import product_text
from compiled_kernels.linear_w8a8.mlir_rows import TAIL, quantize_text
from compiled_kernels.mlir import Kernel, compile_text
from compiled_kernels.mlir.invoke import COMPUTE_DTYPES, BoundCall, check_argument, libgomp_path
from compiled_kernels.mlir_text import MLIR_TYPES, SIZE_BOUND, THREADS, Named, Target, call, declare_arguments, memref

NAME = "linear_w8a8"
AnyProduct = Product | FewRows | ManyRows


def linear_w8a8(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    (tokens, _), (out, width), panels = x.shape, shape_of(values), in_panels(values)
    check_argument(NAME, "x", x, (tokens, width), COMPUTE_DTYPES, contiguous=False)
    check_argument(NAME, "scales", scales, (out,), (torch.float32,), contiguous=False)
    sizes = (values.shape[0], values.shape[1], PANEL, VALUES_PER_WORD[torch.int8]) if panels else (out, width)
    check_argument(NAME, "values", values, sizes, (torch.int8,), contiguous=panels)
    weights = (as_words(values) if panels else values.contiguous(), scales.contiguous())
    if bias is not None:
        check_argument(NAME, "bias", bias, (out,), (bias.dtype,), contiguous=False)
        weights = (*weights, bias.to(x.dtype).contiguous())
    if not tokens or not out:
        return x.new_empty(tokens, out)
    kernel, product = _compiled(
        Target.current(), tokens_of(tokens, panels), width, out, MLIR_TYPES[x.dtype], bias is not None, panels
    )
    rows = torch.empty(tokens, product.int8_rows.words + TAIL, dtype=torch.int32)
    found = torch.empty(tokens, out, dtype=x.dtype if isinstance(product, ManyRows) else torch.float32)
    BoundCall(kernel.address, (x.contiguous(), rows, *weights, found, torch.tensor([tokens])))()
    return found.to(x.dtype)


def tokens_of(tokens: int, panels: bool) -> int:
    """The number of rows that code is compiled for: 0 stands for any number from where one function serves all."""
    return tokens if tokens <= (TILE_ROWS if panels else MAX_ROWS_TOGETHER - 1) else 0


def stages(case: Case, operator: str = NAME) -> Mapping[str, str]:
    """Every stage of the function that runs for `case`."""
    of = case.arguments
    panels = bool(of.get("panels"))
    shape = tokens_of(of["tokens"], panels), of["width"], of["out"], MLIR_TYPES[of["dtype"]], of["bias"]
    return _compiled(Target.current(), *shape, panels)[0].stages


@functools.lru_cache(maxsize=512)
def _compiled(
    target: Target, tokens: int, width: int, out: int, x: str, bias: bool, panels: bool
) -> tuple[Kernel, AnyProduct]:
    product: AnyProduct
    if not panels:
        product = Product(
            "product",
            tokens or MAX_ROWS_TOGETHER,
            width,
            out,
            "i8",
            x,
            target,
            bias=bias,
            any_rows=not tokens,
            w8a8=True,
        )
        text = product_text(product)
    elif tokens:
        product = FewRows("product", width, out, "i8", x, target, bias, tokens, w8a8=True)
        text = few_text(product)
    else:
        product = ManyRows("product", width, out, "i8", x, target, bias, out_dtype=x, w8a8=True)
        text = many_text(product, store_sums)
    count = tokens or SIZE_BOUND
    text = "\n".join((THREADS, quantize_text("quantize", product.int8_rows, count), text, _entry(product, count)))
    return compile_text(text, NAME, level=target.level, libraries=(libgomp_path(),)), product


def _entry(product: AnyProduct, count: int) -> str:
    """@linear_w8a8(x, x in INT8, weight, scales, bias, out, (rows))."""
    given, rows = Named("given", memref((count, product.in_features), product.x_dtype)), Named("x", product.x_type)
    weights = (Named(f"w{i}", kind) for i, kind in enumerate(product.weight_types))
    passed = [rows, *weights, Named("out", product.out_type)]
    many = isinstance(product, ManyRows)
    bounds = [Named("begin", "index"), Named("end", "index")]
    bounds += [Named("rows", "index")] if many or isinstance(product, Product) and product.any_rows else []
    unit = TILE_ROWS if many else product.block
    share = "call @share({}, %{}, %thread, %threads) : (index, index, index, index) -> (index, index)".format
    return f"""func.func @{NAME}({declare_arguments([given, *passed, Named("sizes", "memref<1xi64>")])}) {{
  %zero = arith.constant 0 : index
  %one = arith.constant 1 : index
  %rows64 = memref.load %sizes[%zero] : memref<1xi64>
  %rows = arith.index_cast %rows64 : i64 to index
  %thread, %threads = call @thread() : () -> (index, index)
  %from, %to = {share("%rows", "one")}
  {call("quantize", [given, rows, Named("from", "index"), Named("to", "index")])}
  call @GOMP_barrier() : () -> ()
  %columns = arith.constant {product.out_features} : index
  %unit = arith.constant {unit} : index
  %begin, %end = {share("%rows" if many else "%columns", "unit")}
  {call("product", [*passed, *bounds])}
  return
}}"""
