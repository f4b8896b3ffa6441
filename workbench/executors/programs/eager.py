"""Run the modules as written, on the operators of the model's backend."""

from __future__ import annotations

from torch import Tensor

from workbench.batch import TokenBatch
from workbench.executors.early_layers import LayerTap
from workbench.executors.programs.kernels import StepKernels, as_written
from workbench.executors.programs.program import StepProgram


class EagerProgram(StepProgram):
    """Call the model."""

    def __call__(self, batch: TokenBatch, layers: tuple[int, ...] = ()) -> Tensor:
        if not layers:
            return self.model(batch, self.store)
        tap = LayerTap(layers, batch.logits_indices)
        return tap.beside(self.model(batch, self.store, tap))

    def kernels(self, length: int) -> StepKernels:
        return as_written(str(self.model.backend))
