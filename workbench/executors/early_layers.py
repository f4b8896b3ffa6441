"""Record the hidden states after some layers during a step, for the rows that are sampled.

    logits [sample, vocab]  ->  [sample, vocab + layer * hidden]: each row's logits, then its states after each layer

The states are further columns of the logits, so a selection of rows selects both. Only steps whose plan names layers
have them; `split_columns` separates them from the logits.
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
    """A wrapper of `run`, which computes a block: it records the hidden states after `layers` of the blocks, in one
    forward pass.
    """

    def __init__(self, layers: tuple[int, ...], logits_indices: Tensor, run: RunBlock = run_block):
        self.layers, self.run, self._rows = layers, run, logits_indices
        self._found: dict[int, Tensor] = {}
        self._after = 0  # number of layers that have run

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
        """Record the states [token, hidden] after `layer` layers, for the sampled rows, if that layer is one of
        `layers`.
        """
        if layer in self.layers:
            self._found[layer] = x[self._rows].float()

    def beside(self, logits: Tensor) -> Tensor:
        """Return `logits` [sample, vocab] with the recorded states as further columns."""
        return torch.cat([logits, *(self._found[layer] for layer in self.layers)], -1)


def split_columns(columns: Tensor, vocab: int, layers: tuple[int, ...]) -> tuple[Tensor, dict[int, Tensor]]:
    """Split `columns` into the logits [sample, vocab], and the states [sample, hidden] by number of layers."""
    if columns.shape[1] == vocab:  # an executor without such columns
        return columns, {}
    return columns[:, :vocab], dict(zip(layers, columns[:, vocab:].chunk(len(layers), -1), strict=True))
