"""Note the hidden states after some layers while a step runs, for the rows that are sampled.

    logits [sample, vocab]  ->  [sample, vocab + layer * hidden]: beside each row's logits its states after each layer

They travel as columns of the logits, so that what selects rows selects both. Only steps whose plan names layers have
them; `split_columns` takes them apart.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.batch import TokenBatch
from workbench.kv_cache.layer import CacheLayer
from workbench.model.layers import TransformerBlock
from workbench.model.mixer import Angles
from workbench.model.transformer import RunBlock, run_block


class LayerTap:
    """Call blocks by `run`, and note the states after `layers` of them, in one forward pass."""

    def __init__(self, layers: tuple[int, ...], logits_indices: Tensor, run: RunBlock = run_block):
        self.layers, self.run, self._rows = layers, run, logits_indices
        self._found: dict[int, Tensor] = {}
        self._after = 0  # layers that have run

    def __call__(
        self, block: TransformerBlock, x: Tensor, cos: Angles, sin: Angles, batch: TokenBatch, cache: CacheLayer
    ) -> Tensor:
        if not self._after:
            self.note(0, x)
        x = self.run(block, x, cos, sin, batch, cache)
        self._after += 1
        self.note(self._after, x)
        return x

    def note(self, layer: int, x: Tensor) -> None:
        """Keep the sampled rows of the states [token, hidden] after so many layers, where they are wanted."""
        if layer in self.layers:
            self._found[layer] = x[self._rows].float()

    def beside(self, logits: Tensor) -> Tensor:
        """Return the columns beside `logits` [sample, vocab]."""
        return torch.cat([logits, *(self._found[layer] for layer in self.layers)], -1)


def split_columns(columns: Tensor, vocab: int, layers: tuple[int, ...]) -> tuple[Tensor, dict[int, Tensor]]:
    """Return the logits [sample, vocab], and by number of layers the states [sample, hidden]."""
    if columns.shape[1] == vocab:  # an executor that has none
        return columns, {}
    return columns[:, :vocab], dict(zip(layers, columns[:, vocab:].chunk(len(layers), -1), strict=True))
