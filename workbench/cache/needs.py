"""Count the pages that a sequence needs and compare them with those available; changes nothing. Integers only."""

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
        """Return the most pages that `num_sequences` of `num_tokens` tokens need at once, by group; all but the last of
        `num_prompt_tokens` are shared."""
        if self.budget is not None:
            tokens = self.budget.at_once(prompt, tokens)
        counts = []
        for table in self.tables:
            shared = table.settled(prompt - 1) // self.size if table.back is None else 0
            counts.append(sequences * table.most(tokens, self.chunk, self.size) - (sequences - 1) * shared)
        return counts

    def match(self, sequence: Sequence) -> Offer:
        """Return the cached prefix that `sequence` could start from now."""
        if self.prefix is None or sequence.saved is not None or sequence.computed:
            return Offer(0, tuple([] for _ in self.tables))
        ids = sequence.token_ids
        if sequence.followers:  # children start with this prefix and no more
            ids = ids[: 1 + min(follower.joins for follower in sequence.followers)]
        return self.prefix.match(ids, sequence.request.cache_salt)

    def lacks(self, sequence: Sequence, offer: Offer) -> list[int]:
        """Return the pages to allocate, by group, for `sequence` to start from `match` or its swapped pages and run one
        step."""
        saved = sequence.saved
        if sequence.computed:  # it waited on shared pages
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
        """Return the pages to allocate, by group, for the next step of a child besides those that it shares."""
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
        """Return the tokens that the next step may compute, given the numbers of computed and evicted tokens."""
        return self._known(sequence, computed, evicted) - (computed - evicted)

    def short(self, counts: list[int], offer: Offer | None = None) -> int | None:
        """Return the first group without that many available pages besides those offered; None if all suffice."""
        for t, (count, pool) in enumerate(zip(counts, self.pools, strict=True)):
            if count > pool.available - (self._idle(offer, t) if offer is not None else 0):
                return t
        return None

    def available(self, table: int, offer: Offer | None = None) -> int:
        return self.pools[table].available - (self._idle(offer, table) if offer is not None else 0)

    def _known(self, sequence: Sequence, computed: int, evicted: int) -> int:
        """Return the tokens that the sequence holds after its next step."""
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
