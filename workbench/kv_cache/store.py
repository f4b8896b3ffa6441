"""Store keys and values in pages: dense layers, and the store of all layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

import compiled_kernels
from compiled_kernels import Backend
from compiled_kernels.attention import AttentionParameters
from compiled_kernels.page_selection.api import select_pages, summarize_pages
from compiled_kernels.paged_attention import PagedKV
from workbench.batch import TokenBatch
from workbench.errors import WorkbenchError
from workbench.kv_cache.codec import Side
from workbench.kv_cache.codec_layers import CodecLayer, GroupedCodecLayer
from workbench.kv_cache.format import KVCacheSpec
from workbench.kv_cache.layer import CacheLayer, HybridLayer, Put, SharedLayer
from workbench.kv_cache.pages import NULL_PAGE, build_cache_groups
from workbench.kv_cache.quantized import QuantizedLayer, quantize_layers
from workbench.kv_cache.states import StateLayer


class DenseLayer(CacheLayer):
    """One layer's keys and values, each [page, kv_head, offset, head_dim]; page 0 is the null page. A layer that
    chooses pages has summaries of each page's keys, each [page, kv_head, head_dim].

    With multi-head latent attention values are columns of the keys and both are one tensor: backends read it at equal
    width, and the surplus is cut off.
    """

    traceable = True

    def __init__(self, shape: KVCacheSpec, pages: int, page_size: int, dtype: torch.dtype, device: str):
        size = (pages + 1, shape.num_kv_heads, page_size, shape.head_dim)
        self.group, self.num_value_columns = shape.group, shape.num_value_columns
        self.keys = torch.zeros(size, dtype=dtype, device=device)
        self.values = torch.zeros(size, dtype=dtype, device=device) if self.num_value_columns is None else self.keys
        self.summary_kinds = () if shape.summaries is None else shape.summaries.kinds
        one = pages + 1, shape.num_kv_heads, shape.head_dim
        self.summaries = tuple(torch.zeros(one, dtype=dtype, device=device) for _ in self.summary_kinds)

    def write(self, k: Tensor, v: Tensor, batch: TokenBatch, backend: Backend = Backend.EAGER) -> None:
        slots = batch.slot_mapping[self.group]
        compiled_kernels.kv_write(self.keys, k, slots, backend)
        if self.num_value_columns is None:
            compiled_kernels.kv_write(self.values, v, slots, backend)
        if self.summary_kinds:
            summarize_pages(self.summaries, self.keys, slots, self.summary_kinds)

    def read(self, q: Tensor, batch: TokenBatch, parameters: AttentionParameters) -> PagedKV:
        """Return the layer's pages, and which of them the queries [token, head, head_dim] choose, where they do."""
        kv, selection = PagedKV(self.keys, self.values, batch.page_tables[self.group]), parameters.selection
        if selection is None:
            return kv
        return kv._replace(chosen=select_pages(q, self.summaries, kv.page_table, batch.spans, selection))

    def page_tensors(self, group: int) -> tuple[Tensor, ...]:
        if group != self.group:
            return ()
        return (self.keys, self.values, *self.summaries) if self.num_value_columns is None else (self.keys,)

    def move(self, put: Put) -> None:
        self.keys = put(self.keys)
        self.values = put(self.values) if self.num_value_columns is None else self.keys
        self.summaries = tuple(map(put, self.summaries))

    def slot_tensors(self) -> tuple[Tensor, ...]:
        """Return views [page, kv_head, offset, ...] of all that a slot holds of its token."""
        return self.page_tensors(self.group)

    def held(self, pages: list[int], count: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of these pages, which hold `count` tokens: each [page, kv_head, offset, dim]."""
        return self.keys[pages], self.values[pages][..., : self.num_value_columns]

    def encode(self, rows: Tensor, side: Side) -> tuple[Tensor, ...]:
        """Return rows [slot, kv_head, dim] of keys or values as they are stored."""
        return (rows,)


def check_page_size(specs: Iterable[KVCacheSpec], page_size: int) -> None:
    """Raise WorkbenchError where a layer chooses among pages of another size."""
    for layer, shape in enumerate(specs):
        if shape.summaries is not None and shape.summaries.page_size != page_size:
            wanted = shape.summaries.page_size
            message = f"layer {layer} chooses pages of {wanted} tokens; set cache.page_size to {wanted}"
            raise WorkbenchError(f"cache.page_size {page_size}: {message}")


class KVStore:
    """All layers' pages. Cache groups may have different numbers of pages.

    `on_layer` is called with the number of each layer that was computed, by programs that call them one by one.
    """

    on_layer: Callable[[int], None] | None = None

    def __init__(
        self,
        specs: Iterable[KVCacheSpec],
        num_pages: tuple[int, ...],
        page_size: int,
        dtype: torch.dtype,
        device: str = "cpu",
    ):
        self.specs = tuple(specs)
        check_page_size(self.specs, page_size)
        self.groups = build_cache_groups(shape.cache_groups for shape in self.specs)
        self.num_pages = num_pages
        self.page_size = page_size
        self.dtype = dtype
        layers: list[CacheLayer] = []
        for shape in self.specs:
            source = shape.shared_with
            layers.append(self._own_layer(shape, device) if source is None else SharedLayer(layers[source]))
        self.layers = tuple(layers)

    def _own_layer(self, shape: KVCacheSpec, device: str) -> CacheLayer:
        if shape.state is None:
            return self._attention_layer(shape, device)
        states = StateLayer(shape.state, shape.state_group, self.num_pages[shape.state_group], self.dtype, device)
        return HybridLayer(self._attention_layer(shape, device), states) if shape.num_kv_heads else states

    def _attention_layer(self, shape: KVCacheSpec, device: str) -> CacheLayer:
        sizes, pages = (self.page_size, self.dtype, device), self.num_pages[shape.group]
        if shape.keeps_residual:
            both = pages, self.num_pages[shape.residual_group]
            if shape.codec is not None:
                return GroupedCodecLayer(shape, shape.codec, both, *sizes)
            return QuantizedLayer(shape, both, *sizes)
        if shape.codec is not None:
            return CodecLayer(shape, shape.codec, pages, *sizes)
        return DenseLayer(shape, pages, *sizes)

    @property
    def residual_length(self) -> int | None:
        """Return the tokens of one sequence that a step may compute and quantize beforehand (`quantize_pending`); None:
        any."""
        return min(
            (shape.quantization_rule.residual_length for shape in self.specs if shape.keeps_residual), default=None
        )

    @property
    def bytes(self) -> int:
        """Return the bytes that the tensors hold."""
        return sum(tensor.nbytes for group in range(len(self.groups)) for tensor in self.page_tensors(group))

    @property
    def codec_tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors of the layers' codecs that all tokens share (codebooks, bases, scales); they are in no
        page, and not in `bytes`."""
        codecs = dict.fromkeys(shape.codec for shape in self.specs if shape.codec is not None)
        return tuple({id(tensor): tensor for codec in codecs for tensor in codec.tensors()}.values())

    @property
    def codec_bytes(self) -> int:
        """Return the bytes of `codec_tensors`, however many sequences there are."""
        return sum(tensor.nbytes for tensor in self.codec_tensors)

    @property
    def bytes_per_token(self) -> float:
        """Return num_kv_heads x head_dim x bytes of a key and a value, scales included, summed over the layers.

        What quantized layers keep in full precision beside it is `residual_bytes`, once per sequence.
        """
        total = sum(shape.bytes_per_token(self.dtype) for shape in self.specs)
        return int(total) if total == int(total) else total

    @property
    def bytes_per_value(self) -> float:
        """Return the bytes of one number of a key or value, scales included."""
        values = sum(shape.values_per_token for shape in self.specs)
        return self.bytes_per_token / values if values else self.dtype.itemsize

    @property
    def residual_bytes(self) -> int:
        """Return the most bytes that a long sequence keeps in full precision beside its quantized tokens."""
        return sum(shape.residual_bytes(self.dtype) for shape in self.specs)

    def page_bytes(self, group: int) -> int:
        """Return the bytes of one page of a cache group in all its layers."""
        return round(sum(shape.page_bytes(group, self.page_size, self.dtype) for shape in self.specs))

    @property
    def expected_bytes(self) -> int:
        """Return the bytes of every slot by the formula, null pages included; equals `bytes` exactly."""
        return sum((pages + 1) * self.page_bytes(table) for table, pages in enumerate(self.num_pages))

    def quantize_pending(self, batch: TokenBatch) -> None:
        """Quantize what a step of decodes makes old enough, before it is computed.

        A token is never quantized by its own step, so everything it needs lies in pages of earlier steps.
        """
        alike: dict[KVCacheSpec, list[QuantizedLayer]] = {}
        for layer in self.layers:
            if isinstance(layer, QuantizedLayer):
                alike.setdefault(layer.shape, []).append(layer)
        for layers in alike.values():
            quantize_layers(layers, batch)

    def page_tensors(self, group: int) -> tuple[Tensor, ...]:
        """Return every tensor whose first axis is the pages of a cache group, layer by layer."""
        return tuple(tensor for layer in self.layers for tensor in layer.page_tensors(group))

    def move(self, put: Put) -> None:
        """Replace each tensor of each layer, in order, by what `put` returns for it; before anything reads them."""
        for layer in self.layers:
            layer.move(put)

    def zero_pages(self, group: int, pages: Iterable[int]) -> None:
        """Zero `pages` of a cache group, so that contents of a failed request never reach the next owner."""
        index = torch.tensor([NULL_PAGE, *pages])
        for tensor in self.page_tensors(group):
            tensor[index] = 0

    def copy_pages(self, group: int, sources: list[int], targets: list[int]) -> None:
        """Copy each page of `sources` to the page beside it in `targets`; no target is given twice."""
        for tensor in self.page_tensors(group):
            tensor[torch.tensor(targets)] = tensor[torch.tensor(sources)]
