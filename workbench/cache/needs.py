"""How many pages a sequence needs, and whether they are to be had: nothing changes hands here. Integers only."""

from __future__ import annotations

from collections.abc import Sequence as Many

from workbench.cache.budget import Budget
from workbench.cache.pages import NULL_PAGE, PagePool, pages_for
from workbench.cache.prefix import Offer, PrefixIndex
from workbench.cache.tables import Table
from workbench.request import Sequence


class Needs:
    """`chunk` is the most tokens that a step computes of one sequence, but for drafts after its last one: so far ahead
    a windowed table has pages, and no further, however long the prompt. It therefore never holds more than
    `Table.most`, which is what `at_once` promises before a request is let in.

    `prefix` offers pages that were kept; `budget` is what a sequence may hold where tokens are evicted.
    """

    def __init__(
        self,
        pools: Many[PagePool],
        tables: Many[Table],
        chunk: int,
        prefix: PrefixIndex | None = None,
        budget: Budget | None = None,
    ):
        if len(pools) != len(tables):
            raise ValueError(f"{len(pools)} pools for {len(tables)} tables")
        self.pools, self.tables, self.chunk = tuple(pools), tuple(tables), chunk
        self.prefix, self.budget, self.size = prefix, budget, self.pools[0].page_size

    def at_once(self, tokens: int, prompt: int, sequences: int = 1) -> list[int]:
        """Pages that `sequences` of `tokens` tokens need at once, at most, by table; `prompt` of them are given, and
        shared but for the last."""
        if self.budget is not None:
            tokens = self.budget.at_once(prompt, tokens)
        counts = []
        for table in self.tables:
            shared = table.settled(prompt - 1) // self.size if table.back is None else 0
            counts.append(sequences * table.most(tokens, self.chunk, self.size) - (sequences - 1) * shared)
        return counts

    def match(self, sequence: Sequence) -> Offer:
        """What `sequence` need not compute, when it begins now."""
        if self.prefix is None or sequence.saved is not None or sequence.computed:
            return Offer(0, tuple([] for _ in self.tables))
        ids = sequence.token_ids
        if sequence.followers:  # they begin with so many tokens and no more
            ids = ids[: 1 + min(follower.joins for follower in sequence.followers)]
        return self.prefix.match(ids, sequence.request.cache_salt)

    def lacks(self, sequence: Sequence, offer: Offer) -> list[int]:
        """Pages to be taken, by table, for `sequence` to begin on `offer`, or what it saved, and for its next step."""
        saved = sequence.saved
        if sequence.computed:  # it waited on pages that it shares
            return self.missing(sequence) or [0] * len(self.tables)
        if saved is not None:
            computed, evicted, held = saved.computed, saved.evicted, [len(places) for places in saved.places]
            here = [sum(place == NULL_PAGE for place in places) for places in saved.places]
        else:
            computed, evicted, held = offer.tokens, 0, [len(pages) for pages in offer.pages]
            here = [offer.held(t) for t in range(len(self.tables))]
        known = self._known(sequence, computed, evicted)
        computed -= evicted
        counts = []
        for t, table in enumerate(self.tables):
            place = table.settled(computed) // self.size
            copied = saved is None and offer.has(t, place)
            stop = self._stop(table, computed, known)
            counts.append(max(stop, held[t]) - here[t] + copied)
        return counts

    def beyond(self, follower: Sequence) -> list[int]:
        """Pages to be taken, by table, for the next step of `follower` besides those that it will share."""
        known, joins = len(follower.token_ids), follower.joins
        return [
            max(1, self._stop(table, joins, known) - table.settled(joins) // self.size) for table in self.tables
        ]

    def missing(self, sequence: Sequence, drafted: int = 0) -> list[int] | None:
        """Pages to be taken, by table, before the next step of a sequence that runs, with so many tokens computed on
        trial; None for none at all."""
        known = self._known(sequence, sequence.computed, sequence.evicted)
        if known + drafted <= sequence.covered:
            return None
        counts = []
        for table, pages, pool in zip(self.tables, sequence.pages, self.pools, strict=True):
            stop = self._stop(table, sequence.held, known, drafted)
            place = table.settled(sequence.held) // self.size
            copied = place < len(pages) and pool.holders(pages[place]) > 1
            counts.append(max(0, stop - len(pages)) + copied)
        return counts

    def next_tokens(self, sequence: Sequence, computed: int, evicted: int) -> int:
        """How many tokens the next step of a sequence may compute, with so many computed, of which some are evicted."""
        return self._known(sequence, computed, evicted) - (computed - evicted)

    def short(self, counts: list[int], offer: Offer | None = None) -> int | None:
        """The first table that has not so many pages to give, besides those offered."""
        for t, (count, pool) in enumerate(zip(counts, self.pools, strict=True)):
            if count > pool.available - (self._idle(offer, t) if offer is not None else 0):
                return t
        return None

    def available(self, table: int, offer: Offer | None = None) -> int:
        return self.pools[table].available - (self._idle(offer, table) if offer is not None else 0)

    def _known(self, sequence: Sequence, computed: int, evicted: int) -> int:
        """Tokens that it holds after its next step, when so many are computed and evicted."""
        known = len(sequence.token_ids) - evicted
        left = None if self.budget is None else self.budget.left(sequence.prompt_length, computed, evicted)
        return known if left is None else min(known, computed - evicted + left)

    def _stop(self, table: Table, computed: int, known: int, drafted: int = 0) -> int:
        """How long the list of pages must be for the next step; `drafted` tokens follow the last that is known."""
        cut = table.back is not None and known > computed + self.chunk
        end = computed + self.chunk if cut else known + drafted
        return pages_for(table.settled(end), self.size)

    def _idle(self, offer: Offer, table: int) -> int:
        return sum(page in self.pools[table].idle for page in offer.pages[table])
