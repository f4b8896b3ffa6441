"""Find which compiled functions carry a step out, as the runner's executor calls them: each holds some operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from compiled_kernels import Backend
from workbench.executors.base import EagerExecutor, FallbackExecutor, MlirExecutor
from workbench.executors.capabilities import COLUMNS, Requirements, unsupported
from workbench.executors.cuda_graph import CudaGraphExecutor
from workbench.executors.inductor import InductorExecutor
from workbench.executors.prefill import PrefillExecutor
from workbench.executors.token_parallel import TokenParallelExecutor
from workbench.widgets.model_graph.data import GraphStep, ModelOperator, Side

if TYPE_CHECKING:
    from workbench.engine.runner import Runner

AS_WRITTEN = "as written: each operator is a call of its own"
STEP_SIDES: tuple[Side, ...] = ("before", "write", "attend", "after", "head")


@dataclass(frozen=True)
class StepKernels:
    """The way a step is carried out: `description` in a line, the backend of each side, and by side the function that
    has its operators. In the name of a function `{layer}` is the layer's number; a side without one has a call for
    each operator."""

    description: str
    backends: Mapping[Side, str]
    functions: Mapping[Side, str] = field(default_factory=dict)

    def backend_of(self, operator: ModelOperator) -> str:
        return self.backends.get(operator.side, str(Backend.EAGER))

    def kernel_of(self, operator: ModelOperator) -> str:
        """Return the name of the one function or call that carries an operator out."""
        function = self.functions.get(operator.side)
        return operator.key if function is None else function.format(layer=operator.layer)


def as_written(backend: Backend | str = Backend.EAGER) -> StepKernels:
    return StepKernels(AS_WRITTEN, dict.fromkeys(STEP_SIDES, str(backend)))


def step_kernels(runner: Runner, step: GraphStep) -> StepKernels:
    """Return how the runner's executor carries out this step."""
    executor = runner.core.executor
    if isinstance(executor, MlirExecutor):
        rest = executor.prefill_executor
        if step.length == 1:
            return _one_function("mlir: blocks and head are one compiled function")
        limit = executor.max_token_parallel_tokens
        residual = runner.store.residual_length
        tokens_a_call = 64 if residual is None else max(1, min(residual, 64))
        if step.length <= limit and not step.length > tokens_a_call < 64:
            return _rows("mlir: its tokens are rows of one compiled function")
        executor = rest
    if isinstance(executor, FallbackExecutor):
        executor = executor.executor
    if isinstance(executor, TokenParallelExecutor):
        return _rows("mlir: its tokens are rows of one compiled function")
    if isinstance(executor, PrefillExecutor):
        return _two_sides("mlir: a compiled function for each side of a block's attention", "mlir", "mlir")
    if isinstance(executor, InductorExecutor):
        return _inductor(executor, step)
    backend = str(runner.model.backend)
    if isinstance(executor, CudaGraphExecutor) and step.length == 1:
        return StepKernels(f"{AS_WRITTEN}; all are captured as one CUDA graph", dict.fromkeys(STEP_SIDES, backend))
    if isinstance(executor, EagerExecutor | CudaGraphExecutor):
        return as_written(backend)
    where = f"how {type(executor).__name__} groups operators is not known here; they stand as the modules are written"
    return StepKernels(where, dict.fromkeys(STEP_SIDES, backend))


def _one_function(description: str) -> StepKernels:
    return StepKernels(description, dict.fromkeys(STEP_SIDES, "mlir"), dict.fromkeys(STEP_SIDES, "whole step"))


def _rows(description: str) -> StepKernels:
    functions: dict[Side, str] = dict.fromkeys(STEP_SIDES, "all blocks")
    return StepKernels(description, dict.fromkeys(STEP_SIDES, "mlir"), {**functions, "head": "head"})


def _two_sides(description: str, blocks: str, attention: str) -> StepKernels:
    backends: dict[Side, str] = {**dict.fromkeys(STEP_SIDES, blocks), "write": attention, "attend": attention}
    functions: dict[Side, str] = {"before": "before attention {layer}", "after": "after attention {layer}"}
    return StepKernels(description, backends, {**functions, "head": "head"})


def _inductor(executor: InductorExecutor, step: GraphStep) -> StepKernels:
    backends: dict[Side, str] = dict.fromkeys(STEP_SIDES, "inductor")
    if step.length > 1:
        description = "inductor: a graph for each side of a block's attention, which walks the spans between them"
        return _two_sides(description, "inductor", str(executor.attention_backend))
    if executor.compile_unit == "step":
        functions: dict[Side, str] = dict.fromkeys(STEP_SIDES, "whole step")
        return StepKernels("inductor: the step is one graph", {**backends, "embed": "inductor"},
                           {**functions, "embed": "whole step"})  # fmt: skip
    if not all(layer.traceable for layer in executor.store.layers):
        return _two_sides("inductor: a graph for each side of a block's attention; no graph can hold this cache",
                          "inductor", str(executor.attention_backend))  # fmt: skip
    functions = dict.fromkeys(STEP_SIDES, "block {layer}")
    return StepKernels("inductor: each block is one graph", backends, {**functions, "head": "head"})


def group_by_kernel(kernels: StepKernels, operators: Sequence[ModelOperator]) -> dict[str, tuple[ModelOperator, ...]]:
    """Return the operators of each function or call, in order of their first ones."""
    found: dict[str, list[ModelOperator]] = {}
    for operator in operators:
        found.setdefault(kernels.kernel_of(operator), []).append(operator)
    return {name: tuple(each) for name, each in found.items()}


def capabilities(runner: Runner) -> list[tuple[str, str]]:
    """Return each column of the capability table with the reason why it cannot carry this model and cache out; an
    empty reason where it can."""
    wanted = Requirements.from_model(runner.model, runner.store)
    refusals = ((name, unsupported(backend, wanted, role)) for name, (backend, role) in COLUMNS.items())
    return [(name, "" if refusal is None else str(refusal)) for name, refusal in refusals]
