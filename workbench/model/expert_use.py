"""Count the rows that each expert of a model's mixtures computes: recorded while steps run, taken once a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from workbench.model.feedforward import MixtureOfExperts

LayerCounts = tuple[tuple[int, tuple[int, ...]], ...]  # (layer, rows of each expert)


class ExpertUse:
    """Counts of a model's mixtures since they were last taken.

    Modules write the experts that each row chose to a buffer of their own (in a compiled graph too); compiled steps
    have such buffers. Rows of padding come last, and are left out.
    """

    def __init__(self, blocks: Iterable[nn.Module], max_rows: int):
        """Let mixtures of a model's `blocks` keep what up to `max_rows` rows choose."""
        parts = {index: getattr(block, "feedforward", None) for index, block in enumerate(blocks)}
        self._mixtures = {index: part for index, part in parts.items() if isinstance(part, MixtureOfExperts)}
        self._counts = {i: torch.zeros(part.router.num_experts, dtype=torch.long) for i, part in self._mixtures.items()}
        for part in self._mixtures.values():
            shape = max_rows, part.num_experts_per_tok
            part.chosen = torch.zeros(shape, dtype=torch.long, device=part.gate_up.device)

    def count(self, rows: int, chosen: Mapping[int, Tensor] | None = None) -> None:
        """Add the first `rows` rows of the forward pass that has just run: `chosen` [row, expert's place] by layer,
        what the modules kept unless given."""
        if chosen is None:
            chosen = {index: part.chosen for index, part in self._mixtures.items() if part.chosen is not None}
        for index, experts in chosen.items():
            counts = self._counts[index]
            counts += torch.bincount(experts[:rows].flatten().cpu(), minlength=len(counts))

    def take(self) -> LayerCounts:
        """Return the counts since the last call, by layer."""
        found = tuple((index, tuple(counts.tolist())) for index, counts in self._counts.items())
        for counts in self._counts.values():
            counts.zero_()
        return found

    def stop(self) -> None:
        """Let mixtures keep nothing from now on."""
        for part in self._mixtures.values():
            part.chosen = None
