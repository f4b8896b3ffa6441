"""Find out at the first step that needs it whether compiled blocks work here, where the lane was `auto`'s choice.

A decode step through MLIR needs no blocks, so `auto` does not compile them before a prefill is too long for it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from compiled_kernels import Lane, LaneError
from workbench.engine.plan import StepPlan
from workbench.errors import WorkbenchError
from workbench.model.transformer import Transformer

if TYPE_CHECKING:
    from workbench.engine.executors import Executor

MOST_LETTERS = 300  # of a compiler's message


class Vetted:
    """Runs `blocks`. Where their compiler fails at the first step, says so in a warning and runs the modules as written
    from then on; the step is computed anew, over the same cells of the cache."""

    def __init__(self, model: Transformer, blocks: Executor, plain: Callable[[], Executor]):
        self.model, self.executor, self._plain = model, blocks, plain
        self._vetted = False

    @property
    def compiles(self) -> int:
        return self.executor.compiles

    @property
    def kernel_seconds(self) -> float | None:
        return self.executor.kernel_seconds

    @property
    def artifacts(self) -> Mapping[str, str]:
        return self.executor.artifacts

    def forward(self, plan: StepPlan) -> Tensor:
        """Logits as of `Executor`."""
        if self._vetted:
            return self.executor.forward(plan)
        try:
            logits = self.executor.forward(plan)
        except (WorkbenchError, LaneError):
            raise
        except Exception as error:  # whatever a compiler throws
            words = " ".join(f"{type(error).__name__}: {error}".split())[:MOST_LETTERS]
            told = f"lane auto: {self.model.lane} does not compile here, prefill on eager ({words})"
            warnings.warn(told, stacklevel=2)
            self.model.run_on(Lane.EAGER)
            self.executor = self._plain()
            logits = self.executor.forward(plan)
        self._vetted = True
        return logits
