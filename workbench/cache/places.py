"""Places on the host for pages: what a set-back sequence saved lies there until it is back. Integers only."""

from __future__ import annotations

from collections.abc import Sequence as Many

from workbench.cache.moves import Moves
from workbench.cache.pages import NULL_PAGE, PagePool
from workbench.cache.prefix import PrefixIndex
from workbench.request import Saved, Sequence


class Places:
    """`rooms` are the places by table, none without a host. `prefix`, where there is one, lays its pages there too, and
    gives up the one that has lain there longest when somebody else needs the place."""

    def __init__(self, rooms: Many[PagePool], prefix: PrefixIndex | None):
        self.rooms, self.prefix = tuple(rooms), prefix
        self.loaded: dict[int, Saved] = {}  # by sequence: on its way back
        self.fetched: list[tuple[int, int]] = []  # table, place: the same, of pages that the index had here

    def save(self, computed: int, held: list[list[int]], moves: Moves) -> Saved | None:
        """Places for the pages `held`, by table, of a sequence with `computed` tokens; None where they do not fit."""
        wanted = [sum(page != NULL_PAGE for page in pages) for pages in held]
        if not self.rooms or not sum(wanted) or any(n > self._available(t) for t, n in enumerate(wanted)):
            return None
        if any(moves.place(t, page) is not None for t, pages in enumerate(held) for page in pages):
            return None  # what stands in its pages has not come yet
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
        """What `saved` holds comes to the pages of `sequence`; it lies here until that is done."""
        for t, (places, pages) in enumerate(zip(saved.places, sequence.pages, strict=True)):
            moves.loads += [
                (sequence.request_id, t, place, page)
                for place, page in zip(places, pages, strict=True)
                if place != NULL_PAGE
            ]
        self.loaded[sequence.order] = saved

    def recall(self, sequence: Sequence) -> Saved | None:
        """What was to come back with the step being planned stays here; None where nothing was. Its loads are forgotten
        with the pages they were for."""
        return self.loaded.pop(sequence.order, None)

    def carried_out(self) -> None:
        """The moves of the last step are done: what came back need not stay."""
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
