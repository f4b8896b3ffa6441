"""Give filters the logits of early layers that they combine: from the states beside a step's logits, or a refusal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass

from torch import Tensor

from workbench.errors import WorkbenchError
from workbench.sampling.combiners import NamedCombiner


@dataclass(frozen=True)
class EarlyLogits:
    """The early layers of a model of `num_layers`.

    `compute_logits` returns logits [row, vocab] of states [row, hidden]; `problem` says why there are none here; None
    where there are.
    """

    num_layers: int
    compute_logits: Callable[[Tensor], Tensor]
    problem: str | None

    def check(self, combiners: Iterable[NamedCombiner]) -> None:
        """Refuse layers which there are not, or not here (WorkbenchError)."""
        for combiner in combiners:
            if combiner.layers and self.problem:
                raise WorkbenchError(f"filter {combiner.path}: {self.problem}")
            if max(combiner.layers, default=0) >= self.num_layers:
                raise WorkbenchError(
                    f"filter {combiner.path}: layers {combiner.layers}; the model has {self.num_layers}: give 0 to "
                    f"{self.num_layers - 1}"
                )

    def of_rows(self, combiners: Many[NamedCombiner], states: Mapping[int, Tensor], rows: range) -> dict[int, Tensor]:
        """Return by layer the logits [row, vocab] that one sequence's filters combine; it is computed alone.

        Args:
            combiners: its filters that combine other logits.
            states: by layer, the states [sample, hidden] of the step's rows; none where no filter needs them.
            rows: those of the sequence.
        """
        layers = {layer for each in combiners for layer in each.layers} & states.keys()
        return {layer: self.compute_logits(states[layer][rows.start : rows.stop]) for layer in sorted(layers)}
