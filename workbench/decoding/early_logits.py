"""Compute the logits of early layers, which combiners need, from the hidden states of a step; refuse them if they are
not available.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass

from torch import Tensor

from workbench.errors import WorkbenchError
from workbench.sampling.combiners import NamedCombiner


@dataclass(frozen=True)
class EarlyLogits:
    """The logits that early layers of a model with `num_layers` layers would give in place of the last.

    `compute_logits` maps states [row, hidden] to logits [row, vocab]; `problem` is the reason why early logits are not
    available, or None.
    """

    num_layers: int
    compute_logits: Callable[[Tensor], Tensor]
    problem: str | None

    def check(self, combiners: Iterable[NamedCombiner]) -> None:
        """Raise WorkbenchError for unknown layers, or if early logits are not available."""
        for combiner in combiners:
            if combiner.layers and self.problem:
                raise WorkbenchError(f"filter {combiner.path}: {self.problem}")
            if max(combiner.layers, default=0) >= self.num_layers:
                raise WorkbenchError(
                    f"filter {combiner.path}: layers {combiner.layers}; the model has {self.num_layers}: give 0 to "
                    f"{self.num_layers - 1}"
                )

    def of_rows(self, combiners: Many[NamedCombiner], states: Mapping[int, Tensor], rows: range) -> dict[int, Tensor]:
        """Return the early logits [row, vocab] that one sequence's combiners need, by layer. They are computed apart
        from those of other sequences.

        Args:
            combiners: the sequence's combiners.
            states: by layer, the states [sample, hidden] of the step's rows; empty if no filter needs them.
            rows: the range of the sequence's rows.
        """
        layers = {layer for each in combiners for layer in each.layers} & states.keys()
        return {layer: self.compute_logits(states[layer][rows.start : rows.stop]) for layer in sorted(layers)}
