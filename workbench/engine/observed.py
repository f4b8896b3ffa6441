"""Record the queries of attention layers, to recompute attention weights beside any kernel."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from torch import Tensor

from compiled_kernels import Backend
from compiled_kernels.masks import Mask
from compiled_kernels.paged_attention.reference import gather_context, attention_weights
from workbench.batch import TokenBatch
from workbench.cache.store import DenseLayer, KVStore
from workbench.errors import WorkbenchError


class AttentionCall:
    """The arguments of one layer's attention in a step."""

    def __init__(self, layer: DenseLayer, q: Tensor, batch: TokenBatch, scale: float, mask: Mask, *rest: Any):
        self.layer, self.q, self.batch, self.arguments = layer, q, batch, (scale, mask, *rest)

    def attention_mass(self, rows: slice, seq: int, end: int) -> Tensor:
        """Return the attention that the queries `rows` give to each slot, by key/value head: [kv_head, slot].

        The queries are the last ones of sequence number `seq`, up to slot `end`.
        """
        keys = gather_context(self.layer.keys, self.batch.page_tables[self.layer.group][seq], end)
        weights = attention_weights(self.q[rows], keys, end - (rows.stop - rows.start), *self.arguments)
        return weights.double().sum((1, 2))


class ObservedLayer:
    """A layer's cache that records the arguments of its attention."""

    traceable = False  # in a graph the queries could not be seen

    def __init__(self, layer: DenseLayer):
        self.layer, self.group = layer, layer.group
        self.write, self.page_tensors = layer.write, layer.page_tensors
        self._call: AttentionCall | None = None

    def attend(self, q: Tensor, batch: TokenBatch, scale: float, mask: Mask, backend: Backend, *rest: Any) -> Tensor:
        self._call = AttentionCall(self.layer, q, batch, scale, mask, *rest)
        alone = batch.decode_only and backend is not Backend.INDUCTOR  # outside a graph that backend compiles decodes itself
        return self.layer.attend(q, replace(batch, decode_only=alone), scale, mask, backend, *rest)

    def pop_call(self) -> AttentionCall:
        read, self._call = self._call, None
        if read is None:
            raise WorkbenchError("cache.evict: a custom attention module does not read its cache by `attend`")
        return read


def observe_store(store: KVStore) -> tuple[KVStore, tuple[ObservedLayer, ...]]:
    """Return `store` with its layers observed, and these layers."""
    layers = tuple(ObservedLayer(layer) for layer in store.layers if isinstance(layer, DenseLayer))
    seen = copy.copy(store)
    seen.layers = layers  # type: ignore[assignment]
    return seen, layers
