"""The products of the lane mlir whose weight is in panels, run on torch's threads: a compiled function for each number
of rows up to `TILE_ROWS`, whose columns the threads share, and one for all others, whose rows they share."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from compiled_kernels.blocked.few import FewRows, few_text
from compiled_kernels.blocked.layout import PANEL, VALUES, shape_of, words
from compiled_kernels.blocked.many import ManyRows, many_text, stored
from compiled_kernels.blocked.shape import TILE_ROWS
from compiled_kernels.expect import COMPUTED, expect
from compiled_kernels.lanes import LaneError
from compiled_kernels.mlir import Kernel, compile_text
from compiled_kernels.mlir_text import THREADS, TYPES, Named, Target, call, declared
from compiled_kernels.openmp import Call, library


def linear(name: str, x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None) -> Tensor:
    """Multiply x [token, width] by a weight in panels, in the type of x; `scales` are those of INT8."""
    (tokens, _), (out, width) = x.shape, shape_of(weight)
    expect(name, "x", x, (tokens, width), COMPUTED, dense=False)
    _expect(name, x, weight, scales)
    kind = TYPES[weight.dtype]
    if bias is not None:
        expect(name, "bias", bias, (out,), (bias.dtype,), dense=False)
        bias = bias.to(x.dtype).contiguous()
    given = [words(weight), *(part for part in (scales, bias) if part is not None)]
    if not tokens:
        return x.new_empty(0, out)
    if tokens <= TILE_ROWS:
        few = few_rows(Target.here(), name, tokens, width, out, kind, TYPES[x.dtype], bias is not None)
        found = torch.empty(tokens, out)
        Call(few.address, (x.contiguous(), *given, found))()
        return found.to(x.dtype)
    many, entering = many_rows(Target.here(), name, width, out, kind, TYPES[x.dtype], bias is not None)
    found, rows = torch.empty(tokens, out, dtype=x.dtype), torch.tensor([tokens])
    Call(many.address, (x.to(entering).contiguous(), *given, found, rows))()
    return found


def _expect(name: str, x: Tensor, weight: Tensor, scales: Tensor | None) -> None:
    panels, rows, *_ = weight.shape
    types = (torch.int8,) if scales is not None else (x.dtype,)
    if weight.dtype not in types:
        raise LaneError(
            f"{name}: lane mlir reads a weight in panels of {' or '.join(map(str, types))}, not of {weight.dtype}"
        )
    expect(name, "weight", weight, (panels, rows, PANEL, VALUES[weight.dtype]), types)
    if scales is not None:
        expect(name, "scales", scales, (panels * PANEL,), (torch.float32,))


@functools.lru_cache(maxsize=512)
def few_rows(
    target: Target, name: str, rows: int, width: int, out: int, kind: str, x: str, bias: bool
) -> Kernel:
    """Emit @{name}(x, weight, scales, bias, out): every thread takes a share of the columns."""
    product = FewRows("product", width, out, kind, x, target, bias, rows)
    arguments = _arguments(product)
    entry = f"""func.func @{name}({declared(arguments)}) {{
  %thread, %threads = call @thread() : () -> (index, index)
  %count = arith.constant {out} : index
  %unit = arith.constant {PANEL} : index
  %begin, %end = call @share(%count, %unit, %thread, %threads) : (index, index, index, index) -> (index, index)
  {call("product", [*arguments, Named("begin", "index"), Named("end", "index")])}
  return
}}"""
    text = "\n".join((THREADS, few_text(product), entry))
    return compile_text(text, name, level=target.level, libraries=(library(),))


@functools.lru_cache(maxsize=512)
def many_rows(
    target: Target, name: str, width: int, out: int, kind: str, x: str, bias: bool
) -> tuple[Kernel, torch.dtype]:
    """Emit @{name}(x, weight, scales, bias, out, (rows)): every thread takes a share of the rows. And the type that x
    must have."""
    product = ManyRows("product", width, out, kind, x, target, bias, result=x)
    arguments = _arguments(product)
    bounds = [Named(bound, "index") for bound in ("begin", "end", "rows")]
    entry = f"""func.func @{name}({declared([*arguments, Named("sizes", "memref<1xi64>")])}) {{
  %zero = arith.constant 0 : index
  %rows64 = memref.load %sizes[%zero] : memref<1xi64>
  %rows = arith.index_cast %rows64 : i64 to index
  %thread, %threads = call @thread() : () -> (index, index)
  %unit = arith.constant {TILE_ROWS} : index
  %begin, %end = call @share(%rows, %unit, %thread, %threads) : (index, index, index, index) -> (index, index)
  {call("product", [*arguments, *bounds])}
  return
}}"""
    text = "\n".join((THREADS, many_text(product, stored), entry))
    kernel = compile_text(text, name, level=target.level, libraries=(library(),))
    return kernel, torch.bfloat16 if product.entering == "bf16" else torch.float32


def _arguments(product: FewRows | ManyRows) -> list[Named]:
    weights = (Named(f"w{i}", kind) for i, kind in enumerate(product.weight_types))
    return [Named("x", product.x_type), *weights, Named("out", product.out_type)]
