"""Owners of pages at one moment, as plain numbers: the data of a page map.

    page of a group        0 (null) | free | held by sequences | idle: held by the prefix index alone
    slot on the CPU                 free | saved by a preempted sequence | of the index
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from workbench.cache.pages import NULL_PAGE

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class PagePanel:
    """The pages of one table, or the places on the host for them: `pages` of `page_size` tokens, numbered from 1."""

    title: str
    pages: int
    page_size: int
    on_cpu: bool = False


@dataclass(frozen=True, eq=False)
class PageOwner:
    """A sequence, and by panel the pages it holds, in the order of its text; 0 where it needs none (any more)."""

    name: str
    running: bool
    pages: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class PageCensus:
    """Of one panel, by page, with a place for page 0: which owner names it first (-1 for none), how many do, and the
    tokens that stand in it when the step is done (0 without a holder; pages of the index are full)."""

    first_owner: Ints
    num_owners: Ints
    tokens: Ints


@dataclass(frozen=True, eq=False)
class PageSnapshot:
    """Pages as step `step` is computed, or where `between_steps` as they are after the step before it.

    `tokens` and `tokens_before` [owner, panel] are positions in an owner's pages after and before that step. By panel,
    `references` [page] count a page's holders, `in_prefix_index` [page] is true where the prefix index is one of them.
    """

    step: int
    between_steps: bool
    panels: tuple[PagePanel, ...]
    owners: tuple[PageOwner, ...]
    tokens: Ints
    tokens_before: Ints
    references: tuple[Ints, ...]
    in_prefix_index: tuple[NDArray[np.bool_], ...]

    @cached_property
    def census(self) -> tuple[PageCensus, ...]:
        return tuple(self._count_owners(number) for number in range(len(self.panels)))

    @cached_property
    def counts(self) -> tuple[tuple[list[int], int, int], ...]:
        """By panel: the pages each owner shares with no other, those that are shared, those that are idle."""
        panels = range(len(self.panels))
        return tuple((self.num_exclusive(panel), self.num_shared(panel), self.num_idle(panel)) for panel in panels)

    @cached_property
    def last_used_page(self) -> tuple[int, ...]:
        """Return by panel the highest page in use, or 0."""
        return tuple(int(np.flatnonzero(each)[-1]) if each.any() else 0 for each in self.references)

    def num_free(self, panel: int) -> int:
        return int((self.references[panel][1:] == 0).sum())

    def num_shared(self, panel: int) -> int:
        """Pages that several sequences hold."""
        return int((self.census[panel].num_owners > 1).sum())

    def num_idle(self, panel: int) -> int:
        """Pages that the prefix index alone holds."""
        return int((self.in_prefix_index[panel] & (self.census[panel].num_owners == 0)).sum())

    def num_exclusive(self, panel: int) -> list[int]:
        """By owner, the pages it shares with no other."""
        count = self.census[panel]
        return np.bincount(count.first_owner[count.num_owners == 1], minlength=len(self.owners)).tolist()

    def _count_owners(self, panel: int) -> PageCensus:
        size, pages = self.panels[panel].page_size, self.panels[panel].pages
        first, tokens = np.full(pages + 1, -1, np.int32), np.zeros(pages + 1, np.int32)
        owners = np.zeros(pages + 1, np.int32)
        for number in range(len(self.owners) - 1, -1, -1):
            mine = np.array(self.owners[number].pages[panel], np.int32)
            filled = np.clip(self.tokens[number, panel] - size * np.arange(len(mine)), 0, size)
            here = mine != NULL_PAGE
            mine = mine[here]
            first[mine], tokens[mine] = number, np.maximum(tokens[mine], filled[here])
            owners[mine] += 1
        return PageCensus(first, owners, tokens)
