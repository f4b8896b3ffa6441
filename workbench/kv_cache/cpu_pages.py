"""Allocate CPU pages for preempted sequences until they are swapped in. Integers only."""

from __future__ import annotations

from collections.abc import Sequence as Many

from workbench.kv_cache.pages import NULL_PAGE, PagePool, PageTransfers
from workbench.kv_cache.prefix import RadixCache
from workbench.request import Sequence, SwappedPages


class CPUPagePool:
    """The pools of CPU pages, by cache group; empty without offloading. The prefix cache swaps out to the same pages,
    and gives up its oldest ones first.
    """

    def __init__(self, pools: Many[PagePool], prefix: RadixCache | None):
        self.pools, self.prefix = tuple(pools), prefix
        self.swapping_in: dict[int, SwappedPages] = {}  # by sequence: CPU pages being swapped in
        self.fetched: list[tuple[int, int]] = []  # (group, CPU page) being swapped in, for the prefix cache

    def swap_out(self, computed: int, held: list[list[int]], transfers: PageTransfers) -> SwappedPages | None:
        """Plan to swap out the pages `held` of a sequence with `computed` tokens; return their CPU pages, or None if
        they do not fit.
        """
        wanted = [sum(page != NULL_PAGE for page in pages) for pages in held]
        if not self.pools or not sum(wanted) or any(n > self._available(t) for t, n in enumerate(wanted)):
            return None
        if any(transfers.source_cpu_page(t, page) is not None for t, pages in enumerate(held) for page in pages):
            return None  # its pages are not loaded yet
        places: list[list[int]] = []
        for t, pages in enumerate(held):
            mine: list[int] = []
            for page in pages:
                place = NULL_PAGE if page == NULL_PAGE else self._take(t)
                if place != NULL_PAGE:
                    transfers.swap_outs.append((t, transfers.source_page(t, page), place))
                mine.append(place)
            places.append(mine)
        return SwappedPages(computed, tuple(places))

    def swap_in(self, sequence: Sequence, swapped: SwappedPages, transfers: PageTransfers) -> None:
        """Plan to swap `swapped` into the pages of `sequence`; the CPU pages are not released until that is done."""
        for t, (places, pages) in enumerate(zip(swapped.cpu_pages, sequence.pages, strict=True)):
            transfers.swap_ins += [
                (sequence.request_id, t, place, page)
                for place, page in zip(places, pages, strict=True)
                if place != NULL_PAGE
            ]
        self.swapping_in[sequence.arrival_index] = swapped

    def cancel_swap_in(self, sequence: Sequence) -> SwappedPages | None:
        """Cancel the swap-in planned for this step and return its CPU pages; None if there was none."""
        return self.swapping_in.pop(sequence.arrival_index, None)

    def transfers_done(self) -> None:
        """Release CPU pages whose swap-in was executed."""
        for saved in self.swapping_in.values():
            self.release(saved)
        for t, place in self.fetched:
            self.pools[t].release([place])
        self.swapping_in, self.fetched = {}, []

    def release(self, swapped: SwappedPages) -> None:
        for room, mine in zip(self.pools, swapped.cpu_pages, strict=True):
            room.release(place for place in mine if place != NULL_PAGE)

    def _available(self, table: int) -> int:
        return self.pools[table].num_free if self.prefix is None else self.prefix.num_available_cpu_pages(table)

    def _take(self, table: int) -> int:
        return self.pools[table].allocate(1)[0] if self.prefix is None else self.prefix.allocate_cpu_page(table)
