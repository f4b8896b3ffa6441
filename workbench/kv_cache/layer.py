"""Define one layer's part of the cache: methods by which a mixer writes and reads it, and by which its pages are
moved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

import compiled_kernels
from compiled_kernels import Backend
from compiled_kernels.attention import AttentionParameters
from compiled_kernels.paged_attention import PagedKV
from compiled_kernels.quantized_attention import QuantizedKV
from workbench.batch import TokenBatch
from workbench.kv_cache.page_formats import Pages, Put

States = tuple[Tensor, ...]  # each [seq, ...]
# Rows [seq, token, columns] after states [seq, ...] -> outputs [seq, token, columns] and the states after them.
Recurrence = Callable[[Tensor, States], tuple[Tensor, States]]


class CacheLayer:
    """The cache pages of one layer, in some format. Attention calls `write` and `attend`, a recurrence calls `scan`; a
    format implements the methods of its mixer.
    """

    traceable = False  # whether its writes and reads can be part of a graph
    rotates = False  # whether keys and values are stored rotated (see `hadamard_rotate`)
    num_value_columns: int | None = None  # columns of the keys that are the values, if they are stored together
    group = 0  # the cache group of keys and values
    pages: Mapping[int, Pages] = {}  # its own pages, by cache group

    def write(self, k: Tensor, v: Tensor, batch: TokenBatch, backend: Backend = Backend.EAGER) -> None:
        """Store k and v [token, kv_head, head_dim] of the batch's tokens in their slots."""
        raise NotImplementedError

    def read(self, q: Tensor, batch: TokenBatch, parameters: AttentionParameters) -> PagedKV | QuantizedKV:
        """Return the pages that queries [token, head, head_dim] read, with the page tables of their batch."""
        raise NotImplementedError

    def attend(self, q: Tensor, batch: TokenBatch, parameters: AttentionParameters, backend: Backend) -> Tensor:
        """Compute attention of queries [token, head, head_dim] over all positions written so far: [token, head,
        head_dim or value columns]."""
        kv = self.read(q, batch, parameters)
        assert isinstance(kv, PagedKV)
        mixed = compiled_kernels.paged_attention(q, kv, batch.spans, parameters, backend)
        return mixed if self.num_value_columns is None else mixed[..., : self.num_value_columns]

    def scan(self, rows: Tensor, batch: TokenBatch, recurrence: Recurrence) -> Tensor:
        """Run `recurrence` over each span of rows [token, columns], starting from the state before the span: [token,
        columns].
        """
        raise NotImplementedError

    def held(self, pages: list[int], count: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values in these pages, which have `count` tokens: each [page, kv_head, offset, dim]."""
        raise NotImplementedError

    def page_tensors(self, group: int) -> tuple[Tensor, ...]:
        """Return every tensor whose first axis is the pages of a cache group: these tensors are copied, swapped or
        zeroed page by page.
        """
        return self.pages[group].tensors if group in self.pages else ()

    def kernel_tensors(self) -> dict[str, Tensor]:
        """Return, by name, the tensors that a compiled step reads and writes directly."""
        return {name: tensor for pages in self.pages.values() for name, tensor in pages.kernel_tensors().items()}

    def move(self, put: Put) -> None:
        """Replace each tensor by what `put` returns for it, for example a copy in other memory."""
        for pages in self.pages.values():
            pages.move(put)


class LayerView(CacheLayer):
    """A wrapper around another layer of the cache: methods that a subclass does not override are delegated to that
    layer.
    """

    def __init__(self, source: CacheLayer):
        self.source, self.group, self.num_value_columns = source, source.group, source.num_value_columns
        self.pages, self.rotates = source.pages, source.rotates

    def write(self, k: Tensor, v: Tensor, batch: TokenBatch, backend: Backend = Backend.EAGER) -> None:
        self.source.write(k, v, batch, backend)

    def read(self, q: Tensor, batch: TokenBatch, parameters: AttentionParameters) -> PagedKV | QuantizedKV:
        return self.source.read(q, batch, parameters)

    def attend(self, q: Tensor, batch: TokenBatch, parameters: AttentionParameters, backend: Backend) -> Tensor:
        return self.source.attend(q, batch, parameters, backend)

    def held(self, pages: list[int], count: int) -> tuple[Tensor, Tensor]:
        return self.source.held(pages, count)


class SharedLayer(LayerView):
    """The keys and values of an earlier layer, which this layer reads and never writes."""

    def __init__(self, source: CacheLayer):
        super().__init__(source)
        self.pages, self.traceable = {}, source.traceable

    def write(self, k: Tensor, v: Tensor, batch: TokenBatch, backend: Backend = Backend.EAGER) -> None:
        """Do nothing: the earlier layer has written these tokens."""


class HybridLayer(LayerView):
    """One layer's keys and values, together with the states of its recurrence."""

    def __init__(self, attention: CacheLayer, states: CacheLayer):
        super().__init__(attention)
        self.states, self.pages = states, {**attention.pages, **states.pages}

    def scan(self, rows: Tensor, batch: TokenBatch, recurrence: Recurrence) -> Tensor:
        return self.states.scan(rows, batch, recurrence)
