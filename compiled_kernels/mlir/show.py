"""Show the compilation stages of a case: run it, and read the stages stored with the kernel that ran."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from compiled_kernels.backends import Backend, BackendError
from compiled_kernels.cases import Case, suites
from compiled_kernels.mlir.execute import kernels_taken
from compiled_kernels.mlir.leaf import leaf_operator
from compiled_kernels.operators import LOWERED


@dataclass(frozen=True)
class CompiledStages:
    """The compilation stages of one kernel: `digest` names its compiled code in the cache; `stages` are texts in order
    of compilation.
    """

    digest: str
    stages: Mapping[str, str] = field(repr=False)


def stages(operator: str, case: Case | None = None) -> CompiledStages:
    """Return the stages of an operator's kernel for `case` (the first case unless given), `asm` last.

    Raises BackendError for an operator that this backend does not have.
    """
    suite = next((suite for suite in suites() if suite.operator == operator), None)
    if suite is None:
        raise BackendError(f"unknown operator {operator!r}; known: {', '.join(each.operator for each in suites())}")
    inputs = suite.make_inputs(case or suite.cases[0])
    if operator in LOWERED:
        tensors = [each for each in inputs if isinstance(each, Tensor)]
        kernel = leaf_operator(operator).prepare(tensors, *inputs[len(tensors) :]).kernel
        return CompiledStages(kernel.digest, kernel.stages)
    if importlib.util.find_spec(f"{suite.input_maker.__module__.rpartition('.')[0]}.mlir") is None:
        raise BackendError(f"{operator} has no stages on backend mlir")
    with kernels_taken() as taken:
        suite.call(*inputs, backend=Backend.MLIR)
    if not taken:
        raise BackendError(f"{operator}: its case {(case or suite.cases[0]).name!r} runs no kernel")
    return CompiledStages(taken[-1].digest, taken[-1].stages)
