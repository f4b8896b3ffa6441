"""Start a sequence on pages that another engine computed: borrowed pages of shared memory, or copied bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, repeat

import torch
from torch import Tensor

from workbench.cluster.apart.lending import HandedPages, borrow_pages
from workbench.engine.cache import KVCache
from workbench.kv_cache.offload import transfer_pages
from workbench.kv_cache.pages import NULL_PAGE, PageTransfers
from workbench.kv_cache.store import KVStore
from workbench.request import Sequence


def page_contents(store: KVStore, pages: tuple[tuple[int, ...], ...], layer: int | None = None) -> Iterator[Tensor]:
    """Yield the bytes of `pages`, layer by layer and tensor by tensor, as uint8 [page, bytes]; null pages are left out.

    Args:
        store: the cache.
        pages: page numbers by cache group.
        layer: the layer to restrict the bytes to; None for all layers.
    """
    index = [torch.tensor([page for page in each if page != NULL_PAGE], dtype=torch.long) for each in pages]
    for group, tensor in _page_tensors(store, pages, layer):
        yield tensor[index[group]].flatten(1).contiguous().view(torch.uint8)


def _page_tensors(
    store: KVStore, pages: tuple[tuple[int, ...], ...], layer: int | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Yield (cache group, tensor) for each tensor of the layers, skipping cache groups without pages."""
    for cache in store.layers if layer is None else (store.layers[layer],):
        for group, each in enumerate(pages):
            yield from ((group, tensor) for tensor in cache.page_tensors(group) if any(each))


@dataclass(frozen=True)
class BorrowedPages:
    """Pages in memory that both engines map."""

    handed: HandedPages

    def adopt(self, cache: KVCache, sequence: Sequence) -> None:
        borrow_pages(cache.manager, self.handed)
        cache.manager.import_pages(sequence, self.handed.num_computed_tokens, self.handed.pages)

    def decline(self, cache: KVCache) -> None:
        """Give the borrowed pages back, without a sequence on them."""
        borrow_pages(cache.manager, self.handed)
        for pool, pages in zip(cache.manager.pools, self.handed.pages, strict=True):
            pool.release(page for page in pages if page != NULL_PAGE)


@dataclass(frozen=True)
class CopiedPages:
    """Copies of a sequence's pages, as the bytes that `page_contents` yields."""

    handed: HandedPages
    contents: list[Tensor]

    def adopt(self, cache: KVCache, sequence: Sequence) -> None:
        """Give pages of `cache` to `sequence`: pages that the prefix cache already has are shared, all others are
        allocated and filled with the copied bytes.
        """
        manager, sent = cache.manager, self.handed.pages
        match = manager.match_prefix(sequence)
        known = [
            [
                hit if page != NULL_PAGE else NULL_PAGE
                for page, hit in zip(its, chain(hits, repeat(NULL_PAGE)), strict=False)
            ]
            for its, hits in zip(sent, match.pages, strict=True)
        ]
        missing = [sum(map(bool, its)) - sum(map(bool, hits)) for its, hits in zip(sent, known, strict=True)]
        if manager.first_exhausted_group(missing, match) is not None:
            return
        for pool, hits in zip(manager.pools, known, strict=True):  # before allocation, which could evict these pages
            pool.acquire(filter(None, hits))
        pages, filled = list[list[int]](), list[tuple[Tensor, Tensor]]()
        for group, (its, hits) in enumerate(zip(sent, known, strict=True)):
            fresh = iter(manager.allocate_pages(group, missing[group]))
            own = [NULL_PAGE if page == NULL_PAGE or hit else next(fresh) for page, hit in zip(its, hits, strict=True)]
            pages.append([new or hit for new, hit in zip(own, hits, strict=True)])
            targets = [new for new, page in zip(own, its, strict=True) if page != NULL_PAGE]
            places = [place for place, page in enumerate(targets) if page != NULL_PAGE]
            filled.append((torch.tensor(places, dtype=torch.long), torch.tensor(targets, dtype=torch.long)[places]))
        manager.import_pages(sequence, self.handed.num_computed_tokens, pages)
        # Swap pages that the prefix cache evicted for this allocation out to the CPU now, not with the next step.
        swapped, manager.transfers.swap_outs = PageTransfers(swap_outs=manager.transfers.swap_outs), []
        transfer_pages(swapped, cache.store, cache.cpu_store)
        for (group, tensor), part in zip(_page_tensors(cache.store, sent), self.contents, strict=True):
            places, targets = filled[group]
            tensor[targets] = part[places].view(tensor.dtype).view(len(targets), *tensor.shape[1:])

    def decline(self, cache: KVCache) -> None:
        """Do nothing, since copied bytes hold no pages of another engine."""
