"""Count the rows that each expert of a model's mixtures computes. Counts are recorded during a step and read once per
step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from workbench.model.feedforward import MixtureOfExperts

LayerCounts = tuple[tuple[int, tuple[int, ...]], ...]  # (layer, rows of each expert)


class ExpertUse:
    """The number of rows that each expert of a model's mixtures computed since the counts were last read.

    Each module writes the chosen experts of each row to its own buffer (also in a compiled graph); compiled steps have
    such buffers too. Padding rows are last and are left out.
    """

    def __init__(self, blocks: Iterable[nn.Module], max_rows: int):
        """Record the choices of up to `max_rows` rows in the mixtures of `blocks`."""
        parts = {index: getattr(block, "feedforward", None) for index, block in enumerate(blocks)}
        self._mixtures = {index: part for index, part in parts.items() if isinstance(part, MixtureOfExperts)}
        self._counts = {i: torch.zeros(part.router.num_experts, dtype=torch.long) for i, part in self._mixtures.items()}
        for part in self._mixtures.values():
            shape = max_rows, part.num_experts_per_tok
            part.chosen = torch.zeros(shape, dtype=torch.long, device=part.gate_up.device)

    def count(self, rows: int, chosen: Mapping[int, Tensor] | None = None) -> None:
        """Count the first `rows` rows of the last forward pass. `chosen`, by layer, has the experts of each row [row,
        rank of expert]; default: the modules' buffers.
        """
        if chosen is None:
            chosen = {index: part.chosen for index, part in self._mixtures.items() if part.chosen is not None}
        for index, experts in chosen.items():
            counts = self._counts[index]
            counts += torch.bincount(experts[:rows].flatten().cpu(), minlength=len(counts))

    def take(self) -> LayerCounts:
        """Return the number of rows of each expert since the last call, by layer."""
        found = tuple((index, tuple(counts.tolist())) for index, counts in self._counts.items())
        for counts in self._counts.values():
            counts.zero_()
        return found

    def stop(self) -> None:
        """Stop recording."""
        for part in self._mixtures.values():
            part.chosen = None
