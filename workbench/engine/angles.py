"""Cache cosines and sines of rotary positions."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.model.rotary import RotaryTable

POSITIONS_PER_BLOCK = 1024  # positions whose angles are computed together, always


class RotaryCache:
    """A table of float32 angles by position. Computed anew they would take as long as a small step, and could have
    other bits."""

    def __init__(self, table: RotaryTable):
        self._table = table
        self._known = [torch.empty(0), torch.empty(0)]

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin [token, head_dim / 2] of positions [token]."""
        while len(self._known[0]) <= int(positions.max()):
            start = len(self._known[0])
            found = self._table(torch.arange(start, start + POSITIONS_PER_BLOCK, device=positions.device))
            joined = zip(self._known, found, strict=True)
            self._known = [torch.cat([known, more.float()]) if start else more.float() for known, more in joined]
        cos, sin = (known[positions] for known in self._known)
        return cos, sin
