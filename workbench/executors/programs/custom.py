"""Run a user-defined program for the steps that it accepts; the backend's programs compute all other steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    """A user-defined `StepProgram`, which computes the steps that it accepts and is named in errors."""

    kind = "custom"
    resets = True

    def __init__(self, model: Transformer, store: KVStore, part: CustomPart):
        """Build the user-defined program with the model, the cache and its arguments.

        Raises:
            WorkbenchError: if it cannot be built, or does not extend `StepProgram`.
        """
        super().__init__(model, store)
        self.name, self._rows = f"program {part.path}", 0
        own = build_custom(resolve_path(part.path), part.arguments, self.name, model, store)
        if not isinstance(own, StepProgram):
            raise WorkbenchError(f"{self.name}: must be a class that extends StepProgram of workbench.parts")
        if type(own).calls is not StepProgram.calls or own.every_row:
            raise WorkbenchError(f"{self.name}: calls and every_row are for programs of a backend; leave them out")
        self.own = own

    def accept(self, plan: StepPlan) -> StepPlan | None:
        rows = self._named(lambda: self.own.accept(plan))
        if not isinstance(rows, StepPlan | None):
            raise WorkbenchError(f"{self.name}: accept returned a {type(rows).__name__}, not a StepPlan or None")
        if rows is not None and _computed(rows) != _computed(plan):
            raise WorkbenchError(f"{self.name}: accept returned other tokens or rows of logits than the plan has")
        return rows

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

    @property
    def made(self) -> int:  # type: ignore[override] (the user's own)
        return self.own.made

    @property
    def artifacts(self) -> Mapping[str, str]:  # type: ignore[override] (the user's own)
        return self.own.artifacts

    @property
    def chosen(self) -> Mapping[int, Tensor] | None:  # type: ignore[override] (the user's own)
        return self.own.chosen

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


def _computed(plan: StepPlan) -> tuple[list[tuple[str, int]], list[str]]:
    """Return a plan's computed tokens as (sequence, position), and the sequence of each row of logits."""
    names = [(span.sequence.request_id, span) for span in plan.spans]
    tokens = [(name, position) for name, span in names for position in range(span.start, span.end)]
    return tokens, [name for name, span in names for _ in range(span.num_logits)]
