"""The lane mlir of the products: one compiled function for each shape, run on torch's threads."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from compiled_kernels.cases import Case
from compiled_kernels.lanes import LaneError
from compiled_kernels.linear.mlir_text import Product, product_text
from compiled_kernels.mlir import Kernel, compile_text
from compiled_kernels.mlir_text import THREADS, TYPES, Named, Target, call, declared
from compiled_kernels.openmp import Call, library


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _run(x, "linear", TYPES.get(weight.dtype, ""), 0, (weight,), bias)


def linear_int8(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    return _run(x, "linear_int8", "i8", 0, (values, scales), bias)


def linear_int4(x: Tensor, packed: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    return _run(x, "linear_int4", "i4", x.shape[1] // scales.shape[1], (packed, scales), bias)


def stages(case: Case, operator: str = "linear") -> Mapping[str, str]:
    """Every stage of the function that runs for `case`."""
    of = case.arguments
    kind = {"linear_int8": "i8", "linear_int4": "i4"}.get(operator, TYPES[of["dtype"]])
    shape = (of["tokens"], of["width"], of["out"])
    return _compiled(operator, *shape, kind, TYPES[of["dtype"]], of.get("group", 0), of["bias"]).stages


def _run(x: Tensor, name: str, kind: str, group: int, weights: tuple[Tensor, ...], bias: Tensor | None) -> Tensor:
    if x.dtype not in (torch.float32, torch.bfloat16) or kind not in ("f32", "bf16", "i8", "i4"):
        raise LaneError(f"{name}: lane mlir takes float32 and bfloat16, not {x.dtype} and {weights[0].dtype}")
    x = x.contiguous()
    weights = tuple(weight.contiguous() for weight in weights)
    out = torch.empty(x.shape[0], weights[0].shape[0])
    kernel = _compiled(name, *x.shape, out.shape[1], kind, TYPES[x.dtype], group, bias is not None)
    Call(kernel.address, (x, *weights, *(() if bias is None else (bias.to(x.dtype),)), out))()
    return out.to(x.dtype)


@functools.lru_cache(maxsize=512)
def _compiled(name: str, rows: int, width: int, out: int, kind: str, x: str, group: int, bias: bool) -> Kernel:
    product = Product("product", rows, width, out, kind, x, Target.here(), group, bias)
    text = "\n".join((THREADS, product_text(product), _entry(product, name)))
    return compile_text(text, name, libraries=(library(),))


def _entry(product: Product, name: str) -> str:
    """@{name}(x, weight, scales, bias, out): run by all threads at once, each of which takes a share of the columns."""
    weights = (Named(f"w{i}", kind) for i, kind in enumerate(product.weight_types))
    arguments = [Named("x", product.x_type), *weights, Named("out", product.out_type)]
    return f"""func.func @{name}({declared(arguments)}) {{
  %thread, %threads = call @thread() : () -> (index, index)
  %count = arith.constant {product.out} : index
  %unit = arith.constant {product.block} : index
  %begin, %end = call @share(%count, %unit, %thread, %threads) : (index, index, index, index) -> (index, index)
  {call("product", [*arguments, Named("begin", "index"), Named("end", "index")])}
  return
}}"""
