"""Record the queries of attention layers, to recompute attention weights beside any kernel."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from torch import Tensor

from compiled_kernels import Lane
from compiled_kernels.masks import Mask
from compiled_kernels.paged_attention.reference import context_of, weigh
from workbench.batch import TokenBatch
from workbench.cache.store import DenseLayer, KVStore
from workbench.errors import WorkbenchError


class Read:
    """The arguments of one layer's attention in a step."""

    def __init__(self, layer: DenseLayer, q: Tensor, batch: TokenBatch, scale: float, mask: Mask, *rest: Any):
        self.layer, self.q, self.batch, self.rule = layer, q, batch, (scale, mask, *rest)

    def mass(self, rows: slice, seq: int, end: int) -> Tensor:
        """Return the attention that the queries `rows` give to each slot, by key/value head: [kv_head, slot].

        The queries are the last ones of sequence number `seq`, up to slot `end`.
        """
        keys = context_of(self.layer.keys, self.batch.page_tables[self.layer.table][seq], end)
        weights = weigh(self.q[rows], keys, end - (rows.stop - rows.start), *self.rule)
        return weights.double().sum((1, 2))


class Observed:
    """A layer's cache that records the arguments of its attention."""

    traceable = False  # in a graph the queries could not be seen

    def __init__(self, layer: DenseLayer):
        self.layer, self.table = layer, layer.table
        self.write, self.paged = layer.write, layer.paged
        self._read: Read | None = None

    def attend(self, q: Tensor, batch: TokenBatch, scale: float, mask: Mask, lane: Lane, *rest: Any) -> Tensor:
        self._read = Read(self.layer, q, batch, scale, mask, *rest)
        alone = batch.decode_only and lane is not Lane.INDUCTOR  # outside a graph that lane compiles decodes itself
        return self.layer.attend(q, replace(batch, decode_only=alone), scale, mask, lane, *rest)

    def given_up(self) -> Read:
        read, self._read = self._read, None
        if read is None:
            raise WorkbenchError("cache.evict: an attention module of your own does not read its cache by `attend`")
        return read


def observed(store: KVStore) -> tuple[KVStore, tuple[Observed, ...]]:
    """Return `store` with its layers observed, and these layers."""
    layers = tuple(Observed(layer) for layer in store.layers if isinstance(layer, DenseLayer))
    seen = copy.copy(store)
    seen.layers = layers  # type: ignore[assignment]
    return seen, layers
