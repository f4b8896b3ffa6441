"""Group the operators of a step by the compiled functions that execute them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from workbench.executors.capabilities import COLUMNS, unsupported
from workbench.executors.programs.kernels import StepKernels
from workbench.executors.requirements import Requirements
from workbench.widgets.model_graph.data import GraphStep, ModelOperator

if TYPE_CHECKING:
    from workbench.engine.runner import Runner


def step_kernels(runner: Runner, step: GraphStep) -> StepKernels:
    """Return the backends that execute this step, and the names of their compiled functions."""
    return runner.core.executor.kernels(step.length)


def backend_of(kernels: StepKernels, operator: ModelOperator) -> str:
    return kernels.backends.get(operator.side, "eager")


def kernel_of(kernels: StepKernels, operator: ModelOperator) -> str:
    """Return the name of the compiled function, or of the call, that executes an operator."""
    function = kernels.functions.get(operator.side)
    return operator.key if function is None else function.format(layer=operator.layer)


def group_by_kernel(kernels: StepKernels, operators: Sequence[ModelOperator]) -> dict[str, tuple[ModelOperator, ...]]:
    """Return the operators that each compiled function or call executes, by its name, in order of first appearance."""
    found: dict[str, list[ModelOperator]] = {}
    for operator in operators:
        found.setdefault(kernel_of(kernels, operator), []).append(operator)
    return {name: tuple(each) for name, each in found.items()}


def capabilities(runner: Runner) -> list[tuple[str, str]]:
    """Return each column of the capability table with the reason why its backend cannot run this model and cache, or
    ""."""
    wanted = Requirements.from_model(runner.model, runner.store)
    refusals = ((name, unsupported(backend, wanted, role)) for name, (backend, role) in COLUMNS.items())
    return [(name, str(refusal or "")) for name, refusal in refusals]
