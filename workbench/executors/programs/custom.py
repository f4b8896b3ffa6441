"""Run a program of the user's own: it is asked first, and the backend's programs compute the steps that it leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from workbench.custom import build_custom, resolve_path
from workbench.errors import WorkbenchError, describe_error
from workbench.executors.programs.kernels import StepKernels
from workbench.executors.programs.program import StepProgram
from workbench.kv_cache.store import KVStore
from workbench.model.transformer import Transformer
from workbench.request import CustomPart
from workbench.scheduler.plan import StepPlan

Result = TypeVar("Result")


class CustomProgram(StepProgram):
    """Compute the steps that a user's `StepProgram` accepts, and name it where it fails."""

    kind = "custom"
    resets = True

    def __init__(self, model: Transformer, store: KVStore, part: CustomPart):
        """Build the user's program with the model, the cache and its own arguments.

        Raises:
            WorkbenchError: where it cannot be built, or extends no `StepProgram`.
        """
        super().__init__(model, store)
        self.name, self._rows = f"program {part.path}", 0
        own = build_custom(resolve_path(part.path), part.arguments, self.name, model, store)
        if not isinstance(own, StepProgram):
            raise WorkbenchError(f"{self.name}: must be a class that extends StepProgram of workbench.parts")
        self.own = own

    def accept(self, plan: StepPlan) -> StepPlan | None:
        return self._named(lambda: self.own.accept(plan))

    def pack(self, plan: StepPlan) -> Any:
        self._rows = sum(span.num_logits for span in plan.spans)
        return self._named(lambda: self.own.pack(plan))

    def __call__(self, batch: Any, layers: tuple[int, ...] = ()) -> Tensor:
        logits = self._named(lambda: self.own(batch, layers))
        spec = self.model.spec
        wanted = self._rows, spec.vocab_size + len(layers) * spec.hidden_size
        if not isinstance(logits, Tensor) or logits.shape != wanted:
            given = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise WorkbenchError(f"{self.name}: returned {given}, not logits {list(wanted)}")
        return logits

    def reset(self) -> None:
        self._named(self.own.reset)

    def kernels(self, length: int) -> StepKernels:
        return self.own.kernels(length)

    def _named(self, work: Callable[[], Result]) -> Result:
        try:
            return work()
        except WorkbenchError:
            raise
        except Exception as error:
            raise WorkbenchError(f"{self.name}: {describe_error(error)}") from error
