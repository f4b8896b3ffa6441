"""Combine a step's operators, the functions that execute them, and predicted and measured seconds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from workbench.executors.programs.kernels import StepKernels
from workbench.model.cost import StepCostEstimate
from workbench.model.spec import ModelSpec
from workbench.widgets.model_graph.data import GraphStep, ModelOperator, equal_layers
from workbench.widgets.model_graph.kernels import group_by_kernel, kernel_of
from workbench.widgets.model_graph.roofline import Roof

NOT_MEASURED = "not measured"
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class MeasuredSeconds:
    """A measured time, or None. `remark` says what the time covers, or why it is unknown; `scope` is a short label for
    a time that covers several operators."""

    seconds: float | None
    remark: str
    scope: str = ""


@dataclass(frozen=True)
class OperatorGraph:
    """The operators of `step`, with the kernels that execute them and their times.

    `read` and `gemm` are the roofs for predicted times. `timers` maps the operators' timers to seconds, `functions`
    maps functions' names to seconds; `whole` is the measured time of the whole step.
    """

    spec: ModelSpec
    step: GraphStep
    operators: tuple[ModelOperator, ...]
    kernels: StepKernels
    read: Roof | None = None
    gemm: Roof | None = None
    timers: Mapping[str, float] = field(default_factory=dict)
    functions: Mapping[str, float] = field(default_factory=dict)
    whole: MeasuredSeconds = MeasuredSeconds(None, NOT_MEASURED)
    unmeasured: str = NOT_MEASURED  # why an operator has no time

    @cached_property
    def groups(self) -> dict[str, tuple[ModelOperator, ...]]:
        return group_by_kernel(self.kernels, self.operators)

    @cached_property
    def letters(self) -> dict[str, str]:
        """Return a letter for each function with several operators; functions that differ only in the layer share a
        letter."""
        found: dict[str, str] = {}
        letters: dict[str, str] = {}
        for name, operators in self.groups.items():
            if len(operators) > 1:
                kind = self.kernels.functions.get(operators[0].side, name)
                letters[name] = found.setdefault(kind, LETTERS[len(found) % len(LETTERS)])
        return letters

    def layers(self) -> tuple[tuple[int, ...], ...]:
        return equal_layers(self.spec)

    def of_layer(self, layer: int) -> tuple[ModelOperator, ...]:
        return tuple(operator for operator in self.operators if operator.layer == layer)

    def predicted(self, operators: Iterable[ModelOperator]) -> float | None:
        """Return the roofline's seconds of `operators` that run as one; None if the roofs or the costs are unknown."""
        cost = total_cost(operators)
        if self.read is None or self.gemm is None or not (cost.flops or cost.bytes):
            return None
        return cost.seconds(self.gemm.rate, self.read.rate)

    def measured(self, operator: ModelOperator) -> MeasuredSeconds:
        kernel = kernel_of(self.kernels, operator)
        first, *others = self.groups[kernel]
        if others or kernel in self.functions:
            if operator is not first:
                return MeasuredSeconds(None, f"within {self.letters[kernel]}")
            if kernel in self.functions:
                if (letter := self.letters.get(kernel)) is None:
                    return MeasuredSeconds(self.functions[kernel], "its own function")
                return MeasuredSeconds(self.functions[kernel], f"all of {letter}, {kernel}", f"all of {letter}")
            return MeasuredSeconds(None, self.unmeasured)
        if operator.timer not in self.timers:
            return MeasuredSeconds(None, self.unmeasured)
        together = [each for each in self.operators if each.timer == operator.timer]
        if len(together) == 1:
            return MeasuredSeconds(self.timers[operator.timer], "its own calls")
        if operator is together[0]:
            remark = "with " + ", ".join(each.name for each in together[1:])
            return MeasuredSeconds(self.timers[operator.timer], remark, f"{len(together)} together")
        return MeasuredSeconds(None, f"within {together[0].name}")

    def measured_layer(self, layer: int) -> float | None:
        """Return the sum of the measured seconds of a layer's operators; None if there are none, or if a compiled
        function was timed."""
        found = [self.measured(operator).seconds for operator in self.of_layer(layer)]
        known = [seconds for seconds in found if seconds is not None]
        whole = any(kernel_of(self.kernels, operator) in self.functions for operator in self.of_layer(layer))
        return math.fsum(known) if known and not whole else None


def total_cost(operators: Iterable[ModelOperator]) -> StepCostEstimate:
    """Return the sum of the FLOPs and of the bytes of all operators that the cost model counts."""
    each = tuple(operators)
    return StepCostEstimate(math.fsum(one.flops or 0.0 for one in each), math.fsum(one.bytes or 0.0 for one in each))
