"""Find out at the first step that needs them whether blocks compile and run here, where the lane was `auto`'s choice.

A decode step through MLIR needs no blocks, so `auto` does not compile them before a prefill is too long for it. What is
found is a failure, an error that is raised; wrong numbers are not: nothing is compared with the modules as written.
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
    """Runs `blocks`. Where they fail at the first step and the modules as written do not, says so in a warning and runs
    those from then on; the step is computed anew, over the same cells of the cache. Where both fail, nothing changes
    and the first error is raised. Numbers are not checked."""

    def __init__(
        self,
        model: Transformer,
        blocks: Executor,
        plain: Callable[[], Executor],
        fell_back: Callable[[str], None] = lambda why: None,
    ):
        """`fell_back` is told, in one line, why the modules as written run from now on."""
        self.model, self.executor, self._plain, self._fell_back = model, blocks, plain, fell_back
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
            logits = self._by_modules(plan, error)
        self._vetted = True
        return logits

    def _by_modules(self, plan: StepPlan, error: Exception) -> Tensor:
        """The step by the modules as written, which stay if they can; if not, `error` was not the compiler's."""
        failed, blocks = self.model.lane, self.executor
        self.model.run_on(Lane.EAGER)
        try:
            self.executor = self._plain()
            logits = self.executor.forward(plan)
        except BaseException as another:
            self.model.run_on(failed)
            self.executor = blocks
            if isinstance(another, Exception):
                raise error from None
            raise
        words = " ".join(f"{type(error).__name__}: {error}".split())[:MOST_LETTERS]
        told = f"{failed} does not compile here, prefill on eager ({words})"
        self._vetted = True
        self._fell_back(told)
        warnings.warn(f"lane auto: {told}", stacklevel=3)
        return logits
