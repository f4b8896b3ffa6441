"""The backend mlir of products by experts, run on torch's threads: one kernel for any number of rows where the weights
lie in panels; where they lie row by row, each named expert's rows go through the product of a dense weight."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from compiled_kernels.backends import BackendError
from compiled_kernels.blocked.layout import PANEL, VALUES_PER_WORD, as_words, in_panels, shape_of
from compiled_kernels.cases import Case
from compiled_kernels.expert_linear.mlir_text import ExpertProduct, expert_text
from compiled_kernels.expert_linear.packed import expert_matrix, stack_group, stack_kind, stack_width
from compiled_kernels.linear import mlir as dense
from compiled_kernels.mlir import Kernel, compile_text
from compiled_kernels.mlir.invoke import COMPUTE_DTYPES, INDEX_DTYPES, BoundCall, check_argument, libgomp_path
from compiled_kernels.mlir_text import MLIR_TYPES, Target

CODE_DTYPES = torch.int8, torch.uint8
CODE_KINDS = {"int8": "i8", "int4": "i4", "mxfp4": "f4"}


def expert_linear(
    x: Tensor, expert: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor | None = None
) -> Tensor:
    """Compute as the api says. Raises BackendError for an expert that there is not."""
    rows, out, width, experts = len(x), shape_of(weight)[0], stack_width(weight), len(weight)
    check_argument("expert_linear", "x", x, (rows, width), COMPUTE_DTYPES, contiguous=False)
    check_argument("expert_linear", "expert", expert, (rows,), INDEX_DTYPES, contiguous=False)
    check_argument(
        "expert_linear", "weight", weight, tuple(weight.shape), COMPUTE_DTYPES if scales is None else CODE_DTYPES
    )
    if bias is not None:
        check_argument("expert_linear", "bias", bias, (experts, out), (bias.dtype,), contiguous=False)
    if not rows:
        return x.new_empty(0, out)
    least, most = (int(each) for each in expert.aminmax())
    if least < 0 or most >= experts:
        raise BackendError(f"expert_linear: rows name experts {least} to {most}; there are 0 to {experts - 1}")
    if not in_panels(weight):
        return _one_by_one(x, expert, weight, bias, scales)
    if bias is None:
        return _from_panels(x, expert, weight, scales, x.dtype)
    return (_from_panels(x, expert, weight, scales, torch.float32) + bias[expert]).to(x.dtype)


def _one_by_one(x: Tensor, expert: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor | None) -> Tensor:
    out = x.new_empty(len(x), weight.shape[1])
    for number in expert.unique().tolist():
        rows = (expert == number).nonzero()[:, 0]
        matrix = expert_matrix(weight, scales, number)
        out[rows] = dense.linear(x[rows], matrix, None if bias is None else bias[number])
    return out


def _from_panels(x: Tensor, expert: Tensor, weight: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the products in `dtype`."""
    (experts, panels, steps, *_), out, width = weight.shape, shape_of(weight)[0], stack_width(weight)
    if scales is None and weight.dtype != x.dtype:
        raise BackendError(f"expert_linear: backend mlir reads weights in panels of {x.dtype}, not of {weight.dtype}")
    check_argument(
        "expert_linear",
        "weight",
        weight,
        (experts, panels, steps, PANEL, VALUES_PER_WORD[weight.dtype]),
        (weight.dtype,),
    )
    group, codes = stack_group(weight, scales), []
    if scales is not None:
        if group and (width % group or group % (8 if weight.dtype == torch.uint8 else 4)):
            groups = scales.shape[-3]
            raise BackendError(f"expert_linear: {groups} scales a row are no groups of whole words of {width} columns")
        grouped = (experts, panels, width // group, PANEL, 1) if group else (experts, out)
        check_argument("expert_linear", "scales", scales, grouped, (scales.dtype,))
        codes = [scales]
    kinds = stack_layout(weight, scales)[0], MLIR_TYPES[x.dtype], MLIR_TYPES[dtype]
    kernel, entering = compiled(Target.current(), experts, width, out, *kinds, group)
    found, order, ends = (
        torch.empty(len(x), out, dtype=dtype),
        torch.empty(len(x), dtype=torch.long),
        torch.empty(experts, dtype=torch.long),
    )
    given = [x.to(entering).contiguous(), as_words(weight), *codes, found, expert.long().contiguous(), order, ends]
    BoundCall(kernel.address, [*given, torch.tensor([len(x)])])()
    return found


def stack_layout(weight: Tensor, scales: Tensor | None) -> tuple[str, int]:
    """Return the type of a stack as products in panels have it, and how many columns share a scale."""
    return CODE_KINDS.get(stack_kind(weight, scales), MLIR_TYPES[weight.dtype]), stack_group(weight, scales)


@functools.lru_cache(maxsize=512)
def compiled(
    target: Target, experts: int, width: int, out: int, weight: str, x: str, result: str, group: int = 0
) -> tuple[Kernel, torch.dtype]:
    """Compile the product; return it, and the type that x must have."""
    product = ExpertProduct("expert_linear", experts, width, out, weight, x, target, result, group)
    kernel = compile_text(expert_text(product), product.name, level=target.level, libraries=(libgomp_path(),))
    return kernel, torch.bfloat16 if product.many.multiplied_dtype == "bf16" else torch.float32


def stages(case: Case) -> Mapping[str, str]:
    """Return every stage of the function that runs for `case`: with weights in panels that of all experts, otherwise
    that of one expert's rows."""
    of = case.arguments
    if not of["panels"]:
        one = {"tokens": 1, "width": of["width"], "out": of["out"], "bias": of["bias"], "dtype": of["dtype"]}
        return dense.stages(Case(case.shape, one, case.cost))
    kind = MLIR_TYPES[of["dtype"]]
    stored, result = CODE_KINDS.get(of.get("kind", ""), kind), "f32" if of["bias"] else kind
    sizes, group = (of["experts"], of["width"], of["out"]), of.get("group", 0)
    return compiled(Target.current(), *sizes, stored, kind, result, group)[0].stages
