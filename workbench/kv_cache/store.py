"""Store the pages of all layers, each in its own format."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from workbench.batch import TokenBatch
from workbench.errors import WorkbenchError
from workbench.kv_cache.attention_layers import AttentionLayer, GroupedLayer, quantize_layers
from workbench.kv_cache.format import KVCacheSpec
from workbench.kv_cache.layer import CacheLayer, HybridLayer, SharedLayer
from workbench.kv_cache.page_formats import CodecPages, DensePages, Put, QuantizedPages
from workbench.kv_cache.pages import NULL_PAGE, build_cache_groups
from workbench.kv_cache.states import StateLayer


def check_page_size(specs: Iterable[KVCacheSpec], page_size: int) -> None:
    """Raise WorkbenchError if a layer selects pages of another size than `page_size`."""
    for layer, shape in enumerate(specs):
        if shape.summaries is not None and shape.summaries.page_size != page_size:
            wanted = shape.summaries.page_size
            message = f"layer {layer} chooses pages of {wanted} tokens; set cache.page_size to {wanted}"
            raise WorkbenchError(f"cache.page_size {page_size}: {message}")


class KVStore:
    """The pages of all layers. Cache groups may have different numbers of pages.

    `on_layer` is called with the index of each computed layer, by programs that run layers one by one.
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
        self._grouped: dict[KVCacheSpec, list[GroupedLayer]] = {}
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
        sizes = self.page_size, self.dtype, device
        pages, codec = (self.num_pages[shape.group], *sizes), shape.codec
        encoded = None if codec is None else CodecPages(shape, codec, *pages)
        if not shape.keeps_residual:
            return AttentionLayer(shape, encoded or DensePages(shape, *pages))
        residual = DensePages(shape, self.num_pages[shape.residual_group], *sizes)
        layer = GroupedLayer(shape, encoded or QuantizedPages(shape, *pages), residual, self.page_size)
        self._grouped.setdefault(shape, []).append(layer)
        return layer

    @property
    def residual_length(self) -> int | None:
        """Return the maximum number of tokens that one sequence may compute in a step that quantizes beforehand
        (`quantize_pending`); None if there is no limit.
        """
        return min(
            (shape.quantization_rule.residual_length for shape in self.specs if shape.keeps_residual), default=None
        )

    @property
    def bytes(self) -> int:
        """Return the number of bytes of all tensors."""
        return sum(tensor.nbytes for group in range(len(self.groups)) for tensor in self.page_tensors(group))

    @property
    def codec_tensors(self) -> tuple[Tensor, ...]:
        """Return the codecs' own tensors, which all tokens share (codebooks, bases, scales); they are not in pages and
        not counted in `bytes`.
        """
        codecs = dict.fromkeys(shape.codec for shape in self.specs if shape.codec is not None)
        return tuple({id(tensor): tensor for codec in codecs for tensor in codec.tensors()}.values())

    @property
    def codec_bytes(self) -> int:
        """Return the number of bytes of `codec_tensors`, which does not depend on the number of sequences."""
        return sum(tensor.nbytes for tensor in self.codec_tensors)

    @property
    def bytes_per_token(self) -> float:
        """Return the number of bytes of a token's keys and values, scales included, summed over the layers.

        Quantized layers also keep `residual_bytes` in full precision, once per sequence.
        """
        total = sum(shape.bytes_per_token(self.dtype) for shape in self.specs)
        return int(total) if total == int(total) else total

    @property
    def bytes_per_value(self) -> float:
        """Return the number of bytes per value of keys and values, scales included."""
        values = sum(shape.values_per_token for shape in self.specs)
        return self.bytes_per_token / values if values else self.dtype.itemsize

    @property
    def residual_bytes(self) -> int:
        """Return the maximum number of bytes that a long sequence stores in full precision in quantized layers."""
        return sum(shape.residual_bytes(self.dtype) for shape in self.specs)

    def page_bytes(self, group: int) -> int:
        """Return the number of bytes of one page of a cache group, in all its layers together."""
        return round(sum(shape.page_bytes(group, self.page_size, self.dtype) for shape in self.specs))

    @property
    def expected_bytes(self) -> int:
        """Return the number of bytes that the pages should take by formula, null pages included; it equals `bytes`."""
        return sum((pages + 1) * self.page_bytes(table) for table, pages in enumerate(self.num_pages))

    def quantize_pending(self, batch: TokenBatch) -> None:
        """Quantize the groups of tokens that become old enough in a step of decodes, before the step is computed.

        A token is never quantized in its own step, so all inputs are in pages of earlier steps.
        """
        for layers in self._grouped.values():
            quantize_layers(layers, batch)

    def page_tensors(self, group: int) -> tuple[Tensor, ...]:
        """Return every tensor whose first axis is the pages of a cache group, layer by layer."""
        return tuple(tensor for layer in self.layers for tensor in layer.page_tensors(group))

    def move(self, put: Put) -> None:
        """Replace each tensor of each layer, in order, by the result of `put`; call it before any tensor is read."""
        for layer in self.layers:
            layer.move(put)

    def zero_pages(self, group: int, pages: Iterable[int]) -> None:
        """Zero `pages` of a cache group, so that contents of a failed request never reach the next owner."""
        index = torch.tensor([NULL_PAGE, *pages])
        for tensor in self.page_tensors(group):
            tensor[index] = 0

    def copy_pages(self, group: int, sources: list[int], targets: list[int]) -> None:
        """Copy each page of `sources` to the corresponding page of `targets`; targets must be distinct."""
        for tensor in self.page_tensors(group):
            tensor[torch.tensor(targets)] = tensor[torch.tensor(sources)]
