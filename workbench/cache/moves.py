"""What becomes of pages before a step computes. Integers only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from workbench.request import Sequence


class Eviction(NamedTuple):
    """Of the `held` tokens of `sequence`, which lie in `pages` by table, `kept` stay, in the first places."""

    sequence: Sequence
    held: int
    kept: int
    pages: tuple[list[int], ...]


@dataclass
class Moves:
    """Carried out in this order: evictions, saves to the host, copies, loads from the host.

    A page that is saved or copied from may belong to somebody else by then, but nobody has written to it yet.
    """

    evictions: list[Eviction] = field(default_factory=list)
    saves: list[tuple[int, int, int]] = field(default_factory=list)  # table, page, place on the host
    copies: list[tuple[int, int, int]] = field(default_factory=list)  # table, page, the page that becomes its copy
    loads: list[tuple[str, int, int, int]] = field(default_factory=list)  # request, table, place on the host, page

    def __bool__(self) -> bool:
        return bool(self.evictions or self.saves or self.copies or self.loads)

    def source(self, table: int, page: int) -> int:
        """Where the contents of `page` are until the moves are carried out."""
        return next((s for t, s, target in self.copies if (t, target) == (table, page)), page)

    def place(self, table: int, page: int) -> int | None:
        """The place on the host that `page` is to be loaded from."""
        return next((place for _, t, place, target in self.loads if (t, target) == (table, page)), None)

    def forget(self, table: int, pages: set[int]) -> None:
        """`pages` were freed: nothing needs to come there."""
        self.copies = [copy for copy in self.copies if copy[0] != table or copy[2] not in pages]
        self.loads = [load for load in self.loads if load[1] != table or load[3] not in pages]
