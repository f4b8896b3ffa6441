"""The products of the backend mlir whose weight is in panels, run on torch's threads: a compiled function for each number
of rows up to `TILE_ROWS`, whose columns the threads share, and one for all others, whose rows they share."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from compiled_kernels.backends import BackendError
from compiled_kernels.blocked.few import FewRows, few_text
from compiled_kernels.blocked.layout import PANEL, VALUES_PER_WORD, as_words, shape_of
from compiled_kernels.blocked.many import ManyRows, many_text, store_sums
from compiled_kernels.blocked.shape import TILE_ROWS
from compiled_kernels.mlir import Kernel, compile_text
from compiled_kernels.mlir.invoke import COMPUTE_DTYPES, BoundCall, check_argument, libgomp_path
from compiled_kernels.mlir_text import MLIR_TYPES, THREADS, Named, Target, call, declare_arguments


def linear(name: str, x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None) -> Tensor:
    """Multiply x [token, width] by a weight in panels, in the type of x; `scales` are those of INT8."""
    (tokens, _), (out, width) = x.shape, shape_of(weight)
    check_argument(name, "x", x, (tokens, width), COMPUTE_DTYPES, contiguous=False)
    _expect(name, x, weight, scales)
    kind = MLIR_TYPES[weight.dtype]
    if bias is not None:
        check_argument(name, "bias", bias, (out,), (bias.dtype,), contiguous=False)
        bias = bias.to(x.dtype).contiguous()
    given = [as_words(weight), *(part for part in (scales, bias) if part is not None)]
    if not tokens:
        return x.new_empty(0, out)
    if tokens <= TILE_ROWS:
        few = few_rows(Target.current(), name, tokens, width, out, kind, MLIR_TYPES[x.dtype], bias is not None)
        found = torch.empty(tokens, out)
        BoundCall(few.address, (x.contiguous(), *given, found))()
        return found.to(x.dtype)
    many, entering = many_rows(Target.current(), name, width, out, kind, MLIR_TYPES[x.dtype], bias is not None)
    found, rows = torch.empty(tokens, out, dtype=x.dtype), torch.tensor([tokens])
    BoundCall(many.address, (x.to(entering).contiguous(), *given, found, rows))()
    return found


def _expect(name: str, x: Tensor, weight: Tensor, scales: Tensor | None) -> None:
    panels, rows, *_ = weight.shape
    types = (torch.int8,) if scales is not None else (x.dtype,)
    if weight.dtype not in types:
        raise BackendError(
            f"{name}: backend mlir reads a weight in panels of {' or '.join(map(str, types))}, not of {weight.dtype}"
        )
    check_argument(name, "weight", weight, (panels, rows, PANEL, VALUES_PER_WORD[weight.dtype]), types)
    if scales is not None:
        check_argument(name, "scales", scales, (panels * PANEL,), (torch.float32,))


@functools.lru_cache(maxsize=512)
def few_rows(target: Target, name: str, rows: int, width: int, out: int, kind: str, x: str, bias: bool) -> Kernel:
    """Emit @{name}(x, weight, scales, bias, out): every thread takes a share of the columns."""
    product = FewRows("product", width, out, kind, x, target, bias, rows)
    arguments = _arguments(product)
    entry = f"""func.func @{name}({declare_arguments(arguments)}) {{
  %thread, %threads = call @thread() : () -> (index, index)
  %count = arith.constant {out} : index
  %unit = arith.constant {PANEL} : index
  %begin, %end = call @share(%count, %unit, %thread, %threads) : (index, index, index, index) -> (index, index)
  {call("product", [*arguments, Named("begin", "index"), Named("end", "index")])}
  return
}}"""
    text = "\n".join((THREADS, few_text(product), entry))
    return compile_text(text, name, level=target.level, libraries=(libgomp_path(),))


@functools.lru_cache(maxsize=512)
def many_rows(
    target: Target, name: str, width: int, out: int, kind: str, x: str, bias: bool
) -> tuple[Kernel, torch.dtype]:
    """Emit @{name}(x, weight, scales, bias, out, (rows)): every thread takes a share of the rows. And the type that x
    must have."""
    product = ManyRows("product", width, out, kind, x, target, bias, out_dtype=x)
    arguments = _arguments(product)
    bounds = [Named(bound, "index") for bound in ("begin", "end", "rows")]
    entry = f"""func.func @{name}({declare_arguments([*arguments, Named("sizes", "memref<1xi64>")])}) {{
  %zero = arith.constant 0 : index
  %rows64 = memref.load %sizes[%zero] : memref<1xi64>
  %rows = arith.index_cast %rows64 : i64 to index
  %thread, %threads = call @thread() : () -> (index, index)
  %unit = arith.constant {TILE_ROWS} : index
  %begin, %end = call @share(%rows, %unit, %thread, %threads) : (index, index, index, index) -> (index, index)
  {call("product", [*arguments, *bounds])}
  return
}}"""
    text = "\n".join((THREADS, many_text(product, store_sums), entry))
    kernel = compile_text(text, name, level=target.level, libraries=(libgomp_path(),))
    return kernel, torch.bfloat16 if product.multiplied_dtype == "bf16" else torch.float32


def _arguments(product: FewRows | ManyRows) -> list[Named]:
    weights = (Named(f"w{i}", kind) for i, kind in enumerate(product.weight_types))
    return [Named("x", product.x_type), *weights, Named("out", product.out_type)]
