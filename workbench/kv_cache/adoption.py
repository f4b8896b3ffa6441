"""Start a sequence on pages that another engine computed: borrowed ones of one memory, or the bytes of others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from workbench.kv_cache.lending import HandedPages
from workbench.kv_cache.manager import KVCacheManager
from workbench.kv_cache.pages import NULL_PAGE
from workbench.kv_cache.store import KVStore
from workbench.request import Sequence as TokenSequence


def page_contents(store: KVStore, pages: tuple[tuple[int, ...], ...], layer: int | None = None) -> Iterator[Tensor]:
    """Yield the bytes of `pages`, layer by layer and tensor by tensor: uint8 [page, bytes], null pages left out.

    Args:
        store: the cache.
        pages: page numbers by cache group.
        layer: of this layer alone.
    """
    for tensor, index in _page_index(store, pages, layer):
        yield tensor[index].flatten(1).contiguous().view(torch.uint8)


def _page_index(
    store: KVStore, pages: tuple[tuple[int, ...], ...], layer: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each tensor of the layers with the pages to read or write, where there are any."""
    wanted = [torch.tensor([page for page in each if page != NULL_PAGE], dtype=torch.long) for each in pages]
    for cache in store.layers if layer is None else (store.layers[layer],):
        for group, index in enumerate(wanted):
            if len(index):
                yield from ((tensor, index) for tensor in cache.page_tensors(group))


class Adoption(Protocol):
    """Pages that another engine computed, for a new sequence."""

    def adopt(self, manager: KVCacheManager, store: KVStore, sequence: TokenSequence) -> None:
        """Give `sequence` the pages, before it is submitted; without room for them it is computed again."""
        ...

    def decline(self, manager: KVCacheManager) -> None:
        """Let the pages go: the request ended before it began."""
        ...


@dataclass(frozen=True)
class BorrowedPages:
    """Pages of a memory that both engines map."""

    handed: HandedPages

    def adopt(self, manager: KVCacheManager, store: KVStore, sequence: TokenSequence) -> None:
        manager.adopt(sequence, self.handed)

    def decline(self, manager: KVCacheManager) -> None:
        manager.decline(self.handed)


@dataclass(frozen=True)
class CopiedPages:
    """Bytes of pages, as `page_contents` gives them."""

    handed: HandedPages
    contents: list[Tensor]

    def adopt(self, manager: KVCacheManager, store: KVStore, sequence: TokenSequence) -> None:
        fill = manager.adopt_copies(sequence, self.handed)
        if fill is None:
            return
        pairs = [
            [own for own, sent in zip(mine, theirs, strict=True) if sent != NULL_PAGE]
            for mine, theirs in zip(fill.pages, self.handed.pages, strict=True)
        ]  # where each page that was sent goes: NULL_PAGE for one that the prefix cache had
        parts = iter(self.contents)
        for cache in store.layers:
            for group, targets in enumerate(pairs):
                used = [(place, page) for place, page in enumerate(targets) if page != NULL_PAGE]
                kept, index = torch.tensor(used, dtype=torch.long).view(-1, 2).unbind(1)
                for tensor in cache.page_tensors(group) if targets else ():
                    tensor[index] = next(parts)[kept].view(tensor.dtype).view(len(index), *tensor.shape[1:])

    def decline(self, manager: KVCacheManager) -> None:
        """Do nothing: the bytes are no pages."""
