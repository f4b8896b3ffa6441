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
from compiled_kernels.linear import mlir as dense
from compiled_kernels.mlir import Kernel, compile_text
from compiled_kernels.mlir.invoke import COMPUTE_DTYPES, INDEX_DTYPES, BoundCall, check_argument, libgomp_path
from compiled_kernels.mlir_text import MLIR_TYPES, Target


def expert_linear(x: Tensor, expert: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute as the api says. Raises BackendError for an expert that there is not."""
    rows, (out, width), experts = len(x), shape_of(weight), len(weight)
    check_argument("expert_linear", "x", x, (rows, width), COMPUTE_DTYPES, contiguous=False)
    check_argument("expert_linear", "expert", expert, (rows,), INDEX_DTYPES, contiguous=False)
    check_argument("expert_linear", "weight", weight, tuple(weight.shape), COMPUTE_DTYPES)
    if bias is not None:
        check_argument("expert_linear", "bias", bias, (experts, out), (bias.dtype,), contiguous=False)
    if not rows:
        return x.new_empty(0, out)
    least, most = (int(each) for each in expert.aminmax())
    if least < 0 or most >= experts:
        raise BackendError(f"expert_linear: rows name experts {least} to {most}; there are 0 to {experts - 1}")
    if not in_panels(weight):
        return _one_by_one(x, expert, weight, bias)
    if bias is None:
        return _from_panels(x, expert, weight, x.dtype)
    return (_from_panels(x, expert, weight, torch.float32) + bias[expert]).to(x.dtype)


def _one_by_one(x: Tensor, expert: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = x.new_empty(len(x), weight.shape[1])
    for number in expert.unique().tolist():
        rows = (expert == number).nonzero()[:, 0]
        out[rows] = dense.linear(x[rows], weight[number], None if bias is None else bias[number])
    return out


def _from_panels(x: Tensor, expert: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the products in `dtype`."""
    (experts, panels, steps, *_), (out, width) = weight.shape, shape_of(weight)
    if weight.dtype != x.dtype:
        raise BackendError(f"expert_linear: backend mlir reads weights in panels of {x.dtype}, not of {weight.dtype}")
    check_argument(
        "expert_linear", "weight", weight, (experts, panels, steps, PANEL, VALUES_PER_WORD[x.dtype]), (x.dtype,)
    )
    kinds = MLIR_TYPES[weight.dtype], MLIR_TYPES[x.dtype], MLIR_TYPES[dtype]
    kernel, entering = compiled(Target.current(), experts, width, out, *kinds)
    found, order, ends = (
        torch.empty(len(x), out, dtype=dtype),
        torch.empty(len(x), dtype=torch.long),
        torch.empty(experts, dtype=torch.long),
    )
    given = [x.to(entering).contiguous(), as_words(weight), found, expert.long().contiguous(), order, ends]
    BoundCall(kernel.address, [*given, torch.tensor([len(x)])])()
    return found


@functools.lru_cache(maxsize=512)
def compiled(
    target: Target, experts: int, width: int, out: int, weight: str, x: str, result: str
) -> tuple[Kernel, torch.dtype]:
    """Compile the product; return it, and the type that x must have."""
    product = ExpertProduct("expert_linear", experts, width, out, weight, x, target, result)
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
    result = "f32" if of["bias"] else kind
    return compiled(Target.current(), of["experts"], of["width"], of["out"], kind, kind, result)[0].stages
