"""Run the model's modules as they are written, on the operators of the model's backend."""

from __future__ import annotations

from torch import Tensor

from compiled_kernels import Backend
from workbench.batch import TokenBatch
from workbench.executors.early_layers import LayerTap
from workbench.executors.programs.kernels import StepKernels, as_written
from workbench.executors.programs.operators import limits_of_backend
from workbench.executors.programs.program import StepProgram
from workbench.executors.requirements import Supports

supports = Supports({
    **limits_of_backend(Backend.EAGER),
    "trees of drafts over quantized or encoded keys, summaries of pages, or states":
        "accepted tokens are moved within pages of dense keys and values",
})  # fmt: skip


class EagerProgram(StepProgram):
    """A program that calls the model."""

    def __call__(self, batch: TokenBatch, layers: tuple[int, ...] = ()) -> Tensor:
        if not layers:
            return self.model(batch, self.store)
        tap = LayerTap(layers, batch.logits_indices)
        return tap.beside(self.model(batch, self.store, tap))

    def kernels(self, length: int) -> StepKernels:
        return as_written(str(self.model.backend))
