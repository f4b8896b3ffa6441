"""Execute an eviction in pages: read, change and move the contents of slots, head by head."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.errors import WorkbenchError
from workbench.kv_cache.codec import SIDES
from workbench.kv_cache.eviction import LayerTokens
from workbench.kv_cache.page_formats import CodecPages, DensePages

Evictable = DensePages | CodecPages


def move_slots(tensors: Iterable[Tensor], pages: list[int], slots: Tensor, size: int) -> None:
    """Move the contents of `slots` [kv_head, kept] of these pages to the first slots, in this order; `tensors` are
    [page, kv_head, offset, ...]."""
    targets = torch.arange(slots.shape[1], device=slots.device)
    moved = (slots != targets).any(0)
    slots, targets = slots[:, moved], targets[moved]
    held, group = torch.tensor(pages, device=slots.device), torch.arange(len(slots), device=slots.device)[:, None]
    for tensor in tensors:
        tensor[held[targets // size], group, targets % size] = tensor[held[slots // size], group, slots % size]


def read_slots(tokens: Evictable, pages: list[int], count: int) -> tuple[Tensor, Tensor]:
    """Return the keys and values of the first `count` slots, as attention reads them: each [kv_head, slot, dim]."""
    keys, values = (each.transpose(0, 1).flatten(1, 2)[:, :count] for each in tokens.held(pages, count))
    return keys, values


@dataclass(frozen=True)
class SlotChange:
    """New contents for some slots of a layer: for keys and for values, a mask of the changed slots [kv_head, slot] and
    the rows of all slots [kv_head, slot, dim]. Unchanged rows are not written again, so a lossy codec encodes them only
    once.
    """

    sides: tuple[tuple[Tensor, Tensor], ...] = ()

    @classmethod
    def between(cls, tokens: LayerTokens, keep: Tensor, merged: Any) -> SlotChange:
        """Return the change that gives the kept slots of `tokens` the keys and values `merged`.

        Raises:
            WorkbenchError: `merged` is not two tensors of the same shapes.
        """
        old = tokens.keys, tokens.values
        shapes = [getattr(each, "shape", None) for each in merged] if isinstance(merged, tuple) else []
        if shapes != [each.shape for each in old]:
            wanted = " and ".join(str(tuple(each.shape)) for each in old)
            raise WorkbenchError(f"cache.evict: merge(layer, keep) must return keys and values, {wanted}")
        return cls(tuple((keep & (new != was).any(-1), new) for was, new in zip(old, merged, strict=True)))

    def apply(self, tokens: Evictable, pages: list[int], size: int) -> None:
        """Write the changed rows into their slots of these pages, which have `size` tokens each."""
        tensors = tokens.slot_tensors()
        held = torch.tensor(pages, device=tensors[0].device)
        first = 0
        for side, (changed, rows) in zip(SIDES, self.sides, strict=False):
            stored = tokens.encode(rows.transpose(0, 1), side)
            heads, slots = changed.nonzero(as_tuple=True)
            for tensor, new in zip(tensors[first : first + len(stored)], stored, strict=True):
                tensor[held[slots // size], heads, slots % size] = new[slots, heads].to(tensor.dtype)
            first += len(stored)
