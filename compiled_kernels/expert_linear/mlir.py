"""Multiply each row by the weight of its expert on the backend mlir, on torch's threads. Weights in panels have one
kernel for any number of rows; for weights stored row by row, each expert's rows are one ordinary product."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from compiled_kernels.backends import BackendError
from compiled_kernels.blocked.layout import as_words, in_panels, shape_of
from compiled_kernels.blocked.many_rows import ManyRows
from compiled_kernels.builder.target import MLIR_TYPES, SIZE_BOUND, Target
from compiled_kernels.expert_linear.listed_rows import ListedRows, multiply_by_experts
from compiled_kernels.expert_linear.stacks import stack_format
from compiled_kernels.linear import mlir as of_matrix
from compiled_kernels.linear.matrix_format import WORDS
from compiled_kernels.linear.mlir import Weight, weight_kind
from compiled_kernels.mlir import Kernel, compile_entry
from compiled_kernels.mlir.invoke import COMPUTE_DTYPES, INDEX_DTYPES, BoundCall, check_argument

NAME = "expert_linear"


def expert_linear(
    x: Tensor, expert: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor | None = None,
    minima: Tensor | None = None, codes: str = "dense",
) -> Tensor:  # fmt: skip
    """Compute the product that api.py describes. Raises BackendError for an expert number that does not exist."""
    rows, width, out, experts = len(x), x.shape[1], shape_of(weight)[0], len(weight)
    check_argument(NAME, "x", x, (rows, width), COMPUTE_DTYPES, contiguous=False)
    check_argument(NAME, "expert", expert, (rows,), INDEX_DTYPES, contiguous=False)
    try:
        format = stack_format(codes, width, scales, minima)
    except ValueError as error:
        raise BackendError(f"{NAME}: {error}") from None
    tensors = [each for each in (weight, scales, minima) if each is not None]
    of_matrix.check_stored(NAME, format, tensors, out, width)
    if bias is not None:
        check_argument(NAME, "bias", bias, (experts, out), (bias.dtype,), contiguous=False)
    if not rows:
        return x.new_empty(0, out)
    least, most = (int(each) for each in expert.aminmax())
    if least < 0 or most >= experts:
        raise BackendError(f"{NAME}: experts must lie in 0..{experts - 1}; {least}..{most} given")
    stack = Weight(weight_kind(format, weight.dtype), format.group, tensors)
    if not in_panels(weight):
        return _one_by_one(x, expert, stack, bias, format.is_dense)
    if bias is None:
        return _from_panels(x, expert, stack, out, x.dtype)
    return (_from_panels(x, expert, stack, out, torch.float32) + bias[expert]).to(x.dtype)


def _one_by_one(x: Tensor, expert: Tensor, stack: Weight, bias: Tensor | None, row_by_row: bool) -> Tensor:
    out = x.new_empty(len(x), stack.tensors[0].shape[1])
    for number in expert.unique().tolist():
        rows = (expert == number).nonzero()[:, 0]
        matrix = stack._replace(tensors=[each[number] for each in stack.tensors])
        out[rows] = of_matrix.multiply(NAME, x[rows], matrix, None if bias is None else bias[number], row_by_row)
    return out


def _from_panels(x: Tensor, expert: Tensor, stack: Weight, out: int, dtype: torch.dtype) -> Tensor:
    """Return the products in `dtype`."""
    (weight, *beside), experts = stack.tensors, len(stack.tensors[0])
    if not beside and weight.dtype != x.dtype:
        raise BackendError(f"{NAME}: backend mlir reads weights in panels of {x.dtype}, not of {weight.dtype}")
    kinds = stack.kind, MLIR_TYPES[x.dtype], MLIR_TYPES[dtype], stack.group
    sizes = experts, x.shape[1], out
    kernel, entering = compiled(Target.current(), *sizes, *kinds, *(MLIR_TYPES[each.dtype] for each in beside))
    found, order, ends = (
        torch.empty(len(x), out, dtype=dtype),
        torch.empty(len(x), dtype=torch.long),
        torch.empty(experts, dtype=torch.long),
    )
    given = [x.to(entering).contiguous(), as_words(weight), *beside, found, expert.long().contiguous(), order, ends]
    BoundCall(kernel.address, [*given, torch.tensor([len(x)])])()
    return found


@functools.lru_cache(maxsize=512)
def compiled(
    target: Target, experts: int, width: int, out: int, weight: str, x: str, result: str, group: int = 0,
    scales: str = "f16", minima: str = "",
) -> tuple[Kernel, torch.dtype]:  # fmt: skip
    """Compile the product; return its kernel and the type that x must have."""
    stack, named = (width, experts * out, weight), weight in WORDS
    more: dict[str, Any] = {"quant_group": 0 if named else group, "scales": scales, "minima": "" if named else minima}
    more |= {"columns": out, "out_dtype": result}
    many = ManyRows(f"{NAME}_many", *stack, x, target, listed=True, **more)
    few = ListedRows(f"{NAME}_few", *stack, many.multiplied_dtype, target, rows=SIZE_BOUND, **more)
    kernel = compile_entry(NAME, target.level, lambda: multiply_by_experts(NAME, few, many, experts))
    return kernel, torch.bfloat16 if many.multiplied_dtype == "bf16" else torch.float32
