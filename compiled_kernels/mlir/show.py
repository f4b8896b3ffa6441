"""The stages of the code that runs a case: read from its artifact, not lowered again."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from compiled_kernels.backends import BackendError
from compiled_kernels.cases import PACKAGES, Case, suites
from compiled_kernels.mlir.leaf import LeafOperator


@dataclass(frozen=True)
class CompiledStages:
    """Stages of one kernel: `digest` names the artifact; `stages` are texts in the order in which they were made."""

    digest: str
    stages: Mapping[str, str] = field(repr=False)


def stages(operator: str, case: Case | None = None) -> CompiledStages:
    """Return the stages of an operator's kernel for `case` (the first, where none is given), `asm` last.

    Raises BackendError for an operator that this backend does not have.
    """
    suite = next((suite for suite in suites() if suite.operator == operator), None)
    if suite is None:
        raise BackendError(f"unknown operator {operator!r}; known: {', '.join(each.operator for each in suites())}")
    case = case or suite.cases[0]
    for package in PACKAGES:
        name = f"compiled_kernels.{package}.mlir"
        if importlib.util.find_spec(name) is None:
            continue
        module = importlib.import_module(name)
        leaf = getattr(module, operator.upper(), None)
        if isinstance(leaf, LeafOperator):
            inputs = suite.make_inputs(case)
            tensors = [each for each in inputs if isinstance(each, Tensor)]
            kernel = leaf.prepare(tensors, *(each for each in inputs if not isinstance(each, Tensor))).kernel
            return CompiledStages(kernel.digest, kernel.stages)
        if suite.input_maker.__module__ == f"compiled_kernels.{package}.cases" and hasattr(module, "stages"):
            made = module.stages(case, operator)
            return CompiledStages(made.digest, made)
    raise BackendError(f"{operator} has no stages on backend mlir")
