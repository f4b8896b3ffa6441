"""A text computed beside its runner, with every query and key kept: attention weights of any row, at any time.

`inspect` looks into a request that is being served, as long as its pages are there. A whole text is for the rest:
texts that have ended, windows whose pages were given back, rows by the thousand. It is the model on the same tokens,
its keys as they were computed: what a packed cache makes of them, or an eviction leaves of them, `inspect` tells.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from einops import rearrange
from torch import Tensor

from compiled_kernels.masks import Mask
from compiled_kernels.paged_attention.reference import attend, weigh
from workbench.batch import TokenBatch
from workbench.cache.store import KVStore
from workbench.errors import WorkbenchError
from workbench.model.transformer import Transformer

CHUNK = 512  # tokens computed at once
BLOCK = 256  # rows whose weights are held at once


class WholeText:
    """What `model` computes of `token_ids`, which `extend` makes longer. One thread at a time extends it."""

    def __init__(self, model: Transformer, token_ids: Iterable[int] = ()):
        self.model = model
        self.token_ids: tuple[int, ...] = ()
        self.layers = tuple(_Layer() for _ in model.blocks)
        self.extend(token_ids)

    @torch.inference_mode()
    def extend(self, token_ids: Iterable[int]) -> None:
        """Compute what stands after the text so far. WorkbenchError where the model's context or vocabulary ends."""
        fresh = tuple(token_ids)
        if not fresh:
            return
        ids = self.model.checked_ids((*self.token_ids, *fresh))
        for begin in range(len(self.token_ids), len(ids), CHUNK):
            self._compute(ids[begin : begin + CHUNK], begin)
        self.token_ids += fresh

    @torch.inference_mode()
    def weights(self, layer: int, rows: range, heads: Sequence[int] | None = None) -> Tensor:
        """[head, row, context up to the last row] in float32 for consecutive rows: zero where a row may not look, less
        than one in all where sink logits take their share."""
        if not 0 <= rows.start <= rows.stop <= len(self.token_ids):
            raise WorkbenchError(f"rows {rows.start} to {rows.stop}: the text has {len(self.token_ids)} tokens")
        found = self.layers[layer].weights(rows)
        return (found if heads is None else found[list(heads)]).float()

    def mask(self, layer: int) -> Mask:
        """Who may look where in a layer."""
        return self.layers[layer].rule[1]

    def _compute(self, ids: Tensor, begin: int) -> None:
        rows = torch.arange(begin, begin + len(ids), device=ids.device)
        spans = torch.tensor([0, len(ids)], dtype=torch.int32, device=ids.device)
        lengths = torch.tensor([begin + len(ids)], dtype=torch.int32, device=ids.device)
        batch = TokenBatch(ids, rows, spans, lengths, (), (), rows[:0], decode_only=False)
        for layer in self.layers:
            layer.begin = begin
        self.model.hidden(batch, cast(KVStore, self))


class _Layer:
    """Stands in for a layer's cache: queries, keys and values of one text, in order."""

    def __init__(self) -> None:
        self.begin = 0
        self.q, self.k, self.v = torch.empty(0), torch.empty(0), torch.empty(0)
        self.rule: tuple[Any, ...] = ()

    def write(self, k: Tensor, v: Tensor, batch: TokenBatch, lane: Any = None) -> None:
        """What an error left behind is written over."""
        self.k, self.v = _joined(self.k, k, self.begin), _joined(self.v, v, self.begin)

    def attend(self, q: Tensor, batch: TokenBatch, scale: float, mask: Mask, lane: Any, *rest: Any) -> Tensor:
        self.q, self.rule = _joined(self.q, q, self.begin), (scale, mask, *rest)
        mixed = []
        for start in range(0, len(q), BLOCK):
            part, end = q[start : start + BLOCK], self.begin + min(start + BLOCK, len(q))
            mixed.append(attend(part, self.k[:end], self.v[:end], self.begin + start, *self.rule))
        return torch.cat(mixed)

    def weights(self, rows: range) -> Tensor:
        if not self.rule:
            raise WorkbenchError("a layer's own module does not read its cache by `attend`: it has no weights to show")
        q, k = self.q[rows.start : rows.stop], self.k[: rows.stop]
        return rearrange(weigh(q, k, rows.start, *self.rule), "group share row context -> (group share) row context")


def _joined(before: Tensor, fresh: Tensor, begin: int) -> Tensor:
    return torch.cat([before[:begin], fresh]) if begin else fresh
