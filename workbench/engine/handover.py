"""Hand a sequence that has finished its prompt over to another engine, which decodes it.

    prefill engine:  prompt, first token -> hand_over: pages lent, sequence ended as `moved`
    decode engine:   adopt -> submitted after these tokens, on these pages -> decode

Engines that map one memory (`SharedPages`) hand over page numbers; nothing is copied. Others hand over the bytes of
those pages. What a page holds is the same in both: an adopted sequence is one that waits on pages, as a sample that
shares its parent's does. It may lose them, and is then computed again like any preempted one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from workbench.engine.resume import why_not_resumable
from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.kv_cache.lending import HandedPages
from workbench.kv_cache.manager import KVCacheManager
from workbench.kv_cache.pages import NULL_PAGE
from workbench.kv_cache.store import KVStore
from workbench.request import Request, Sequence
from workbench.trace.events import Event


@dataclass(frozen=True)
class Handover:
    """A sequence on its way: the request with the tokens it has, and the pages that its next query reads."""

    request: Request
    handed: HandedPages


def why_not_apart(request: Request) -> str:
    """Return why one engine must compute a request from its prompt to its end; empty where two can."""
    if request.sampling.num_sequences > 1:
        return "samples and beams share the pages of their prompt within one engine"
    return why_not_resumable(request)


def ready_sequences(runner: Runner) -> Iterator[Sequence]:
    """Yield the running sequences that have computed their prompt and sampled their first token, between two steps."""
    for sequence in runner.scheduler.running:
        if sequence.num_uncomputed_tokens == 1 and sequence.output_ids and not why_not_apart(sequence.request):
            yield sequence


def hand_over(runner: Runner, sequence: Sequence) -> Handover:
    """Lend the pages of a sequence to another process, and end it here as `moved`. Its loans come back by
    `take_back`."""
    handed = runner.kv_cache.manager.lend(sequence)
    return Handover(_moved(runner, sequence), handed)


def hand_over_copies(runner: Runner, sequence: Sequence) -> tuple[Handover, list[Tensor]]:
    """Return a sequence with the bytes of its pages, and end it here as `moved`.

    Returns:
        the handover, whose page numbers are only this engine's; and `page_contents` of them.
    """
    pages = runner.kv_cache.manager.pages_to_hand_over(sequence)
    handed = HandedPages(sequence.num_computed_tokens, pages)
    contents = list(page_contents(runner.store, pages))
    return Handover(_moved(runner, sequence), handed), contents


def _moved(runner: Runner, sequence: Sequence) -> Request:
    closing = runner.tracker.is_closing(sequence.request_id)
    request = replace(sequence.request, generated_ids=tuple(sequence.output_ids), closing=closing)
    runner.tracker.move_out(sequence)
    return request


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
    """How a new sequence gets pages that another engine computed."""

    def adopt(self, manager: KVCacheManager, store: KVStore, sequence: Sequence) -> None:
        """Give `sequence` the pages, before it is submitted; without room for them it is computed again."""
        ...

    def decline(self, manager: KVCacheManager) -> None:
        """Let the pages go: the request ended before it began."""
        ...


@dataclass(frozen=True)
class BorrowedPages:
    """Pages of a memory that both engines map."""

    handed: HandedPages

    def adopt(self, manager: KVCacheManager, store: KVStore, sequence: Sequence) -> None:
        manager.adopt(sequence, self.handed)

    def decline(self, manager: KVCacheManager) -> None:
        manager.decline(self.handed)


@dataclass(frozen=True)
class CopiedPages:
    """Bytes of pages, as `page_contents` gives them."""

    handed: HandedPages
    contents: list[Tensor]

    def adopt(self, manager: KVCacheManager, store: KVStore, sequence: Sequence) -> None:
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
                kept = torch.tensor([place for place, page in enumerate(targets) if page != NULL_PAGE], dtype=torch.long)
                index = torch.tensor([page for page in targets if page != NULL_PAGE], dtype=torch.long)
                for tensor in cache.page_tensors(group) if targets else ():
                    tensor[index] = next(parts)[kept].view(tensor.dtype).view(len(index), *tensor.shape[1:])

    def decline(self, manager: KVCacheManager) -> None:
        """Do nothing: the bytes are nobody's pages."""


def adopt(runner: Runner, request: Request, adoption: Adoption, queue: deque[Event] | None = None) -> int:
    """Submit a request that goes on after its `generated_ids`, on pages that another engine computed.

    Returns:
        the number of Finished events to expect, as `Runner.submit`.

    Raises:
        WorkbenchError: for a request that has no tokens yet, or whose samples share pages.
    """
    if not request.generated_ids or (why := why_not_apart(request)):
        raise WorkbenchError(f"request {request.request_id} cannot be adopted: {why or 'it has no tokens yet'}")
    runner.tracker.expect_pages(request.request_id, adoption)
    return runner.submit(request, queue)


def take_back(runner: Runner, pages: list[list[int]], tainted: bool = False) -> None:
    """End loans of this engine's pages, by cache group, as often as they are named.

    Args:
        runner: their home.
        pages: the pages.
        tainted: whether a request that failed, or a process that died, may have left anything in them.
    """
    freed = runner.kv_cache.manager.take_back(pages)
    if tainted:
        for group, each in enumerate(freed):
            runner.store.zero_pages(group, each)


def pop_returned(runner: Runner) -> tuple[list[list[int]], list[list[int]]]:
    """Return the borrowed pages that go back to their homes, by cache group: sound ones, and tainted ones."""
    found = runner.kv_cache.manager.pop_returned()
    return [sound for sound, _ in found], [tainted for _, tainted in found]
