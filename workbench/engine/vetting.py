"""Find out at the first long prefill whether blocks compile and run here, if the backend was chosen by `auto`.

A decode step through MLIR needs no blocks, so `auto` does not compile them before a prefill is too long for it. Only
errors are detected: results are not compared with the eager modules.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from compiled_kernels import Backend, BackendError
from workbench.engine.plan import StepPlan
from workbench.errors import WorkbenchError
from workbench.model.transformer import Transformer

if TYPE_CHECKING:
    from workbench.engine.executors import Executor

MAX_MESSAGE_CHARACTERS = 300  # of a compiler's message


class FallbackExecutor:
    """Run `blocks`, and fall back to the eager modules with a warning if the first step fails there and not here.

    The step is then computed again, over the same slots of the cache. If both fail, nothing changes and the first error
    is raised. Results are not compared.
    """

    def __init__(
        self,
        model: Transformer,
        blocks: Executor,
        build_fallback: Callable[[], Executor],
        on_fallback: Callable[[str], None] = lambda why: None,
    ):
        """Wrap `blocks`.

        Args:
            model: the model.
            blocks: the executor to check.
            build_fallback: builds the eager executor.
            on_fallback: receives one line, the reason of the fallback.
        """
        self.model, self.executor, self._plain, self._fell_back = model, blocks, build_fallback, on_fallback
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
        """Return logits as `Executor` does."""
        if self._vetted:
            return self.executor.forward(plan)
        try:
            logits = self.executor.forward(plan)
        except (WorkbenchError, BackendError):
            raise
        except Exception as error:  # whatever a compiler throws
            logits = self._by_modules(plan, error)
        self._vetted = True
        return logits

    def _by_modules(self, plan: StepPlan, error: Exception) -> Tensor:
        """Compute the step by the eager modules and keep them if that works; raise `error` otherwise."""
        failed, blocks = self.model.backend, self.executor
        self.model.set_backend(Backend.EAGER)
        try:
            self.executor = self._plain()
            logits = self.executor.forward(plan)
        except BaseException as another:
            self.model.set_backend(failed)
            self.executor = blocks
            if isinstance(another, Exception):
                raise error from None
            raise
        words = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_MESSAGE_CHARACTERS]
        message = f"{failed} does not compile here, prefill on eager ({words})"
        self._vetted = True
        self._fell_back(message)
        warnings.warn(f"backend auto: {message}", stacklevel=3)
        return logits
