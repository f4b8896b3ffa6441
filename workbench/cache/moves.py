"""List the page transfers that precede a step. Integers only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from workbench.request import Sequence


class Eviction(NamedTuple):
    """An eviction that keeps `num_after` of the `num_before` tokens of `sequence`, in the first slots of `pages`."""

    sequence: Sequence
    num_before: int
    num_after: int
    pages: tuple[list[int], ...]


@dataclass
class PageTransfers:
    """Page transfers of one step, in order of execution: evictions, swap-outs to CPU, copies, swap-ins from CPU.

    The source page of a swap-out or copy may have a new owner already, but it has not been written yet.
    """

    evictions: list[Eviction] = field(default_factory=list)
    swap_outs: list[tuple[int, int, int]] = field(default_factory=list)  # group, page, CPU page
    copies: list[tuple[int, int, int]] = field(default_factory=list)  # group, page, the page that becomes its copy
    swap_ins: list[tuple[str, int, int, int]] = field(default_factory=list)  # request, group, CPU page, page

    def __bool__(self) -> bool:
        return bool(self.evictions or self.swap_outs or self.copies or self.swap_ins)

    def source_page(self, group: int, page: int) -> int:
        """Return the page that has the contents of `page` until the transfers are executed."""
        return next((s for t, s, target in self.copies if (t, target) == (group, page)), page)

    def source_cpu_page(self, group: int, page: int) -> int | None:
        """Return the CPU page that `page` is to be loaded from, or None."""
        return next((place for _, t, place, target in self.swap_ins if (t, target) == (group, page)), None)

    def drop_targets(self, group: int, pages: set[int]) -> None:
        """Drop transfers into `pages`, which were freed."""
        self.copies = [copy for copy in self.copies if copy[0] != group or copy[2] not in pages]
        self.swap_ins = [load for load in self.swap_ins if load[1] != group or load[3] not in pages]
