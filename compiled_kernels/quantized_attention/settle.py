"""Whole groups of tokens pass from recent pages, in full precision, to packed ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from compiled_kernels.quantized_attention.packed import Kind, Packed, storage
from compiled_kernels.quantized_attention.quantize import quantize


@dataclass(frozen=True)
class PageFormat:
    """How pages of `size` tokens hold keys or values of width `dim` for `groups` heads: as `kind`, keys with a scale
    for each channel of `run` tokens, values with one for each `run` columns of a token."""

    kind: Kind
    keys: bool
    groups: int
    dim: int
    size: int
    run: int

    def empty(self, pages: int, dense: torch.dtype, device: str | torch.device = "cpu") -> Packed:
        """Zeroed pages; dense ones are of type `dense`. Raises ValueError where the format does not fit."""
        parts = [((pages, self.groups, self.size, self.dim), dense)]
        if self.kind != "dense":
            summed, kept = (self.dim, self.size) if self.keys else (self.size, self.dim)
            parts = storage(self.kind, (pages, self.groups), summed, kept, self.run)
        return Packed(*(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in parts))


def settle(
    recent: Float[Tensor, "recent_page group offset dim"],
    packed: Packed,
    format: PageFormat,
    group: int,
    from_pages: Int[Tensor, " settling"],
    to_pages: Int[Tensor, " settling"],
    parts: Int[Tensor, " settling"],
    unread: Int[Tensor, " settling"],
) -> None:
    """Quantize groups of `group` tokens, the `parts`-th of their pages, from recent pages into packed ones, in place.

    The first `unread` tokens of a group are read in full precision by everybody: they have no say in its scales.
    """
    tokens = recent.unflatten(2, (-1, group))[from_pages, :, parts]  # [settling, group, token, dim]
    ignored = torch.arange(group, device=recent.device) < unread[:, None]
    tokens = torch.where(ignored[:, None, :, None], tokens[:, :, -1:], tokens)
    if format.kind == "dense":
        packed.codes.unflatten(2, (-1, group))[to_pages, :, parts] = tokens.to(packed.codes.dtype)
        return
    coded = quantize(tokens.transpose(-1, -2) if format.keys else tokens, format.kind, format.run)
    if format.keys:
        packed.codes.unflatten(3, (-1, group))[to_pages, :, :, parts] = coded.codes
    else:
        packed.codes.unflatten(2, (-1, coded.codes.shape[2]))[to_pages, :, parts] = coded.codes
    for pages, run in zip(packed[1:], coded[1:], strict=True):
        if pages is not None and run is not None and format.keys:
            pages[to_pages, :, parts] = run[:, :, 0]
        elif pages is not None and run is not None:
            pages.unflatten(3, (-1, group))[to_pages, :, :, parts] = run

