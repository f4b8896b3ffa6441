"""Allocate CPU pages for preempted sequences until their pages are back. Integers only."""

from __future__ import annotations

from collections.abc import Sequence as Many

from workbench.cache.moves import Moves
from workbench.cache.pages import NULL_PAGE, PagePool
from workbench.cache.prefix import PrefixIndex
from workbench.request import Saved, Sequence


class Places:
    """CPU pages by cache group; none without offloading. A prefix cache swaps out to them too, and gives up its oldest
    first."""

    def __init__(self, rooms: Many[PagePool], prefix: PrefixIndex | None):
        self.rooms, self.prefix = tuple(rooms), prefix
        self.loaded: dict[int, Saved] = {}  # by sequence: being swapped in
        self.fetched: list[tuple[int, int]] = []  # group, CPU page: the same, for pages of the prefix cache

    def save(self, computed: int, held: list[list[int]], moves: Moves) -> Saved | None:
        """Plan the swap-out of the pages `held` of a sequence with `computed` tokens; None if they do not fit."""
        wanted = [sum(page != NULL_PAGE for page in pages) for pages in held]
        if not self.rooms or not sum(wanted) or any(n > self._available(t) for t, n in enumerate(wanted)):
            return None
        if any(moves.place(t, page) is not None for t, pages in enumerate(held) for page in pages):
            return None  # its pages are not loaded yet
        places: list[list[int]] = []
        for t, pages in enumerate(held):
            mine: list[int] = []
            for page in pages:
                place = NULL_PAGE if page == NULL_PAGE else self._take(t)
                if place != NULL_PAGE:
                    moves.saves.append((t, moves.source(t, page), place))
                mine.append(place)
            places.append(mine)
        return Saved(computed, tuple(places))

    def load(self, sequence: Sequence, saved: Saved, moves: Moves) -> None:
        """Plan the swap-in to the pages of `sequence`; its CPU pages are kept until that is done."""
        for t, (places, pages) in enumerate(zip(saved.places, sequence.pages, strict=True)):
            moves.loads += [
                (sequence.request_id, t, place, page)
                for place, page in zip(places, pages, strict=True)
                if place != NULL_PAGE
            ]
        self.loaded[sequence.order] = saved

    def recall(self, sequence: Sequence) -> Saved | None:
        """Cancel the swap-in planned for this step and return its CPU pages; None if there was none."""
        return self.loaded.pop(sequence.order, None)

    def carried_out(self) -> None:
        """Release CPU pages whose swap-in was executed."""
        for saved in self.loaded.values():
            self.release(saved)
        for t, place in self.fetched:
            self.rooms[t].release([place])
        self.loaded, self.fetched = {}, []

    def release(self, saved: Saved) -> None:
        for room, mine in zip(self.rooms, saved.places, strict=True):
            room.release(place for place in mine if place != NULL_PAGE)

    def _available(self, table: int) -> int:
        return self.rooms[table].free if self.prefix is None else self.prefix.places(table)

    def _take(self, table: int) -> int:
        return self.rooms[table].allocate(1)[0] if self.prefix is None else self.prefix.take_place(table)
