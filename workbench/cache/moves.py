"""List the page transfers that precede a step. Integers only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from workbench.request import Sequence


class Eviction(NamedTuple):
    """An eviction that keeps `num_after` of the `num_before` tokens of `sequence`, in the first slots of `pages`."""

    sequence: Sequence
    held: int
    kept: int
    pages: tuple[list[int], ...]


@dataclass
class Moves:
    """Page transfers of one step, in order of execution: evictions, swap-outs to CPU, copies, swap-ins from CPU.

    The source page of a swap-out or copy may have a new owner already, but it has not been written yet.
    """

    evictions: list[Eviction] = field(default_factory=list)
    saves: list[tuple[int, int, int]] = field(default_factory=list)  # group, page, CPU page
    copies: list[tuple[int, int, int]] = field(default_factory=list)  # group, page, the page that becomes its copy
    loads: list[tuple[str, int, int, int]] = field(default_factory=list)  # request, group, CPU page, page

    def __bool__(self) -> bool:
        return bool(self.evictions or self.saves or self.copies or self.loads)

    def source(self, table: int, page: int) -> int:
        """Return the page that has the contents of `page` until the transfers are executed."""
        return next((s for t, s, target in self.copies if (t, target) == (table, page)), page)

    def place(self, table: int, page: int) -> int | None:
        """Return the CPU page that `page` is to be loaded from, or None."""
        return next((place for _, t, place, target in self.loads if (t, target) == (table, page)), None)

    def forget(self, table: int, pages: set[int]) -> None:
        """Drop transfers into `pages`, which were freed."""
        self.copies = [copy for copy in self.copies if copy[0] != table or copy[2] not in pages]
        self.loads = [load for load in self.loads if load[1] != table or load[3] not in pages]
