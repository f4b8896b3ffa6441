"""One layer's part of the cache: the verbs by which a mixer writes and reads it, and what moves its pages."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

import compiled_kernels
from compiled_kernels import Backend
from compiled_kernels.attention import AttentionParameters
from compiled_kernels.paged_attention import PagedKV
from compiled_kernels.quantized_attention import QuantizedKV
from workbench.batch import TokenBatch

Put = Callable[[Tensor], Tensor]  # returns a tensor of the same shape and type, elsewhere
States = tuple[Tensor, ...]  # [seq, ...] each
# Rows [seq, token, columns] after states [seq, ...] -> outputs [seq, token, columns] and the states after them.
Recurrence = Callable[[Tensor, States], tuple[Tensor, States]]


class CacheLayer:
    """One layer's pages in a format. Attention writes and attends, a recurrence scans; a format has what its mixer
    needs."""

    traceable = False  # whether a graph can hold its writes and reads
    rotates = False  # whether keys and values are stored rotated (see `hadamard_rotate`)
    num_value_columns: int | None = None  # of the keys, where values are columns of them
    group = 0  # whose pages hold keys and values

    def write(self, k: Tensor, v: Tensor, batch: TokenBatch, backend: Backend = Backend.EAGER) -> None:
        """Store k and v [token, kv_head, head_dim] of the batch's tokens in their slots."""
        raise NotImplementedError

    def read(self, q: Tensor, batch: TokenBatch, parameters: AttentionParameters) -> PagedKV | QuantizedKV:
        """Return the pages that queries [token, head, head_dim] read, with the page tables of their batch."""
        raise NotImplementedError

    def attend(self, q: Tensor, batch: TokenBatch, parameters: AttentionParameters, backend: Backend) -> Tensor:
        """Return attention of queries [token, head, head_dim] over everything written: [token, head, head_dim or value
        columns]."""
        kv = self.read(q, batch, parameters)
        assert isinstance(kv, PagedKV)
        mixed = compiled_kernels.paged_attention(q, kv, batch.spans, parameters, backend)
        return mixed if self.num_value_columns is None else mixed[..., : self.num_value_columns]

    def scan(self, rows: Tensor, batch: TokenBatch, recurrence: Recurrence) -> Tensor:
        """Run `recurrence` over each span of rows [token, columns], from the state before it: [token, columns]."""
        raise NotImplementedError

    def page_tensors(self, group: int) -> tuple[Tensor, ...]:
        """Return every tensor whose first axis is the pages of a cache group: what is copied, swapped or zeroed with a
        page."""
        raise NotImplementedError

    def move(self, put: Put) -> None:
        """Replace each tensor by what `put` returns for it."""
        raise NotImplementedError


class LayerView(CacheLayer):
    """Another layer's pages: whatever a subclass does not change is done by that layer."""

    def __init__(self, source: CacheLayer):
        self.source, self.group, self.num_value_columns = source, source.group, source.num_value_columns
        self.rotates = source.rotates

    def write(self, k: Tensor, v: Tensor, batch: TokenBatch, backend: Backend = Backend.EAGER) -> None:
        self.source.write(k, v, batch, backend)

    def read(self, q: Tensor, batch: TokenBatch, parameters: AttentionParameters) -> PagedKV | QuantizedKV:
        return self.source.read(q, batch, parameters)

    def attend(self, q: Tensor, batch: TokenBatch, parameters: AttentionParameters, backend: Backend) -> Tensor:
        return self.source.attend(q, batch, parameters, backend)

    def page_tensors(self, group: int) -> tuple[Tensor, ...]:
        return self.source.page_tensors(group)

    def move(self, put: Put) -> None:
        self.source.move(put)


class SharedLayer(LayerView):
    """The keys and values of an earlier layer, which this layer reads and never writes."""

    def __init__(self, source: CacheLayer):
        super().__init__(source)
        self.traceable = source.traceable

    def write(self, k: Tensor, v: Tensor, batch: TokenBatch, backend: Backend = Backend.EAGER) -> None:
        """Do nothing: the earlier layer has written."""

    def page_tensors(self, group: int) -> tuple[Tensor, ...]:
        return ()

    def move(self, put: Put) -> None:
        """Do nothing: the tensors are the earlier layer's."""


class HybridLayer(LayerView):
    """One layer's keys and values beside the states of a recurrence."""

    def __init__(self, attention: CacheLayer, states: CacheLayer):
        super().__init__(attention)
        self.states = states

    def scan(self, rows: Tensor, batch: TokenBatch, recurrence: Recurrence) -> Tensor:
        return self.states.scan(rows, batch, recurrence)

    def page_tensors(self, group: int) -> tuple[Tensor, ...]:
        return *super().page_tensors(group), *self.states.page_tensors(group)

    def move(self, put: Put) -> None:
        super().move(put)
        self.states.move(put)
