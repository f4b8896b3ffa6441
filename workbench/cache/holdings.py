"""Which pages each sequence holds, by the rules of its tables. Integers only.

    match, begin -> take (pages for a step) -> settle (full pages known to the index, dead ones given back) -> release
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace

from workbench.cache.budget import Budget
from workbench.cache.moves import Eviction, Moves
from workbench.cache.pages import NULL_PAGE, PagePool, pages_for
from workbench.cache.places import Places
from workbench.cache.prefix import Offer, PrefixIndex
from workbench.cache.tables import Table
from workbench.request import Saved, Sequence


class Holdings:
    """`chunk` is the most tokens that a step computes of one sequence: so far ahead a windowed table has pages.

    `prefix` keeps full pages for later requests; `host` are the places where pages may lie that it gives up and, where
    it `saves`, those of a sequence that is set back; `budget` is what a sequence may hold where tokens are evicted.
    """

    def __init__(
        self,
        pools: Many[PagePool],
        tables: Many[Table],
        chunk: int,
        prefix: PrefixIndex | None = None,
        host: Many[PagePool] = (),
        budget: Budget | None = None,
        saves: bool = True,
    ):
        if len(pools) != len(tables):
            raise ValueError(f"{len(pools)} pools for {len(tables)} tables")
        self.pools, self.tables, self.chunk = tuple(pools), tuple(tables), chunk
        self.prefix, self.host = prefix, Places(host, prefix)
        self.size, self.budget, self.saves = self.pools[0].page_size, budget, saves
        self.moves = Moves()

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

    def drain(self) -> Moves:
        """The moves that the step being planned begins with."""
        moves, self.moves = self.moves, Moves()
        return moves

    def carried_out(self) -> None:
        """The moves of the last step are done: what was loaded need not stay on the host."""
        self.host.carried_out()

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

    def short(self, counts: list[int], offer: Offer | None = None) -> int | None:
        """The first table that has not so many pages to give, besides those offered."""
        for t, (count, pool) in enumerate(zip(counts, self.pools, strict=True)):
            if count > pool.available - (self._idle(offer, t) if offer is not None else 0):
                return t
        return None

    def available(self, table: int, offer: Offer | None = None) -> int:
        return self.pools[table].available - (self._idle(offer, table) if offer is not None else 0)

    def begin(self, sequence: Sequence, offer: Offer) -> None:
        """`sequence` holds what was offered, or has again what was saved; pages for its next step are still missing."""
        if sequence.saved is not None:
            self._restore(sequence, sequence.saved)
            return
        if sequence.computed:
            return
        sequence.pages = tuple(list(pages) for pages in offer.pages)
        if self.prefix is not None:
            self.prefix.take(sequence.order, offer)
            places = self.prefix.claim(offer)
            for (t, at, node), place in zip(offer.hosted, places, strict=True):
                page = sequence.pages[t][at] = self._allocate(t, 1)[0]
                self.moves.loads.append((sequence.request_id, t, place, page))
                self.prefix.fetched(sequence.order, node, t, page)
                self.host.fetched.append((t, place))
        sequence.computed = offer.tokens
        sequence.covered = sequence.due = 0
        sequence.cached_tokens += offer.tokens
        sequence.shared_pages += offer.shared

    def fork(self, leader: Sequence, follower: Sequence) -> int:
        """`follower` holds the pages of what `leader` has computed, so many; whoever writes to the last one first
        copies it. At any point between two steps; `follower` holds nothing before."""
        follower.pages = tuple(self._written(leader))
        for pool, pages in zip(self.pools, follower.pages, strict=True):
            pool.share(page for page in pages if page != NULL_PAGE)
        if self.prefix is not None:
            self.prefix.fork(leader.order, follower.order, leader.computed)
        follower.computed = leader.computed
        follower.covered = follower.due = leader.covered = 0
        return sum(page != NULL_PAGE for pages in follower.pages for page in pages)

    def missing(self, sequence: Sequence, drafted: int = 0) -> list[int] | None:
        """Pages to be taken, by table, before the next step of a sequence that runs, with so many tokens computed on
        trial; None for none at all."""
        known = self._known(sequence, sequence.computed, sequence.evicted) + drafted
        if known <= sequence.covered:
            return None
        counts = []
        for table, pages, pool in zip(self.tables, sequence.pages, self.pools, strict=True):
            stop = self._stop(table, sequence.held, known)
            place = table.settled(sequence.held) // self.size
            copied = place < len(pages) and pool.holders(pages[place]) > 1
            counts.append(max(0, stop - len(pages)) + copied)
        return counts

    def take(self, sequence: Sequence, drafted: int = 0) -> None:
        """Take what is missing; a page to be written that others hold too becomes a copy."""
        counts = self.missing(sequence, drafted)
        if counts is None:
            return
        covered = []
        for t, (table, pages, pool) in enumerate(zip(self.tables, sequence.pages, self.pools, strict=True)):
            fresh = self._allocate(t, counts[t])
            place = table.settled(sequence.held) // self.size
            if place < len(pages) and pool.holders(pages[place]) > 1:
                self._copy(sequence, t, pages[place], fresh[0])
                pool.release([pages[place]])
                pages[place] = fresh.pop(0)
            pages.extend(fresh)
            covered.append(len(pages) * self.size + table.lag + table.group - 1)
        sequence.covered = min(covered) if sequence.waiting_tokens <= self.chunk else 0

    def cut(self, sequence: Sequence) -> None:
        """Give back pages that nothing stands in but what was computed on trial and fell."""
        for table, pages, pool in zip(self.tables, sequence.pages, self.pools, strict=True):
            known = self._known(sequence, sequence.computed, sequence.evicted)
            stop = self._stop(table, sequence.held, known)
            if len(pages) > stop:
                pool.release(pages[stop:])
                del pages[stop:]
                sequence.covered = 0

    def settle(self, sequence: Sequence) -> None:
        """After a step: full pages are entered into the index, those that no query can reach any more given back."""
        if sequence.computed < sequence.due:
            return
        self._enter(sequence)
        for table, pages, pool in zip(self.tables, sequence.pages, self.pools, strict=True):
            dead = table.dead(sequence.computed, self.size)
            begin = dead.stop
            while begin > dead.start and pages[begin - 1] != NULL_PAGE:
                begin -= 1
            if begin < dead.stop:
                pool.release(pages[begin : dead.stop])
                pages[begin : dead.stop] = [NULL_PAGE] * (dead.stop - begin)
        sequence.due = min(table.changes(sequence.computed, self.size) for table in self.tables)

    def set_back(self, sequence: Sequence) -> int:
        """Take every page from `sequence`; where the host has room, what stands in them is saved: so many pages."""
        saved = self.host.recall(sequence)
        if saved is None:
            saved = None if not self.saves else self.host.save(sequence.computed, self._written(sequence), self.moves)
        else:
            sequence.restored_tokens -= saved.computed
        if saved is not None:
            saved = replace(saved, evicted=sequence.evicted)
        self.release(sequence)
        sequence.saved = saved
        return 0 if saved is None else sum(place != NULL_PAGE for places in saved.places for place in places)

    def end(self, sequence: Sequence, broken: bool = False) -> list[list[int]]:
        """`sequence` will not come again: as `release`, and what a `broken` one ever computed is forgotten."""
        dropped = self.prefix.end(sequence.order, broken) if self.prefix is not None else [[] for _ in self.pools]
        return [ours + theirs for ours, theirs in zip(dropped, self.release(sequence), strict=True)]

    def release(self, sequence: Sequence) -> list[list[int]]:
        """`sequence` holds nothing any more; the pages that became free, by table."""
        freed: list[list[int]] = [[] for _ in self.pools]
        if self.prefix is not None:
            self.prefix.leave(sequence.order)
        for t, (pool, pages) in enumerate(zip(self.pools, sequence.pages, strict=True)):
            # The last first: what leads to a page is given up after it.
            now = pool.release(page for page in reversed(pages) if page != NULL_PAGE)
            self.moves.forget(t, set(now))
            freed[t] += now
        if sequence.saved is not None:
            self.host.release(sequence.saved)
        sequence.pages, sequence.saved = tuple([] for _ in self.pools), None
        sequence.computed = sequence.evicted = sequence.covered = sequence.due = 0
        return freed

    def next_tokens(self, sequence: Sequence, computed: int, evicted: int) -> int:
        """How many tokens the next step of a sequence may compute, with so many computed, of which some are evicted."""
        return self._known(sequence, computed, evicted) - (computed - evicted)

    def evict(self, sequence: Sequence) -> str:
        """Before its next step `sequence` gives up the tokens that its budget has no room for; what is to be said of
        it. Which they are is chosen when the moves are carried out."""
        if self.budget is None:
            return ""
        held = sequence.held
        kept = self.budget.kept(sequence.prompt_length, sequence.computed, sequence.evicted)
        if kept is None:
            return ""
        self.moves.evictions.append(Eviction(sequence, held, kept, tuple(list(pages) for pages in sequence.pages)))
        back = pages_for(kept, self.size)
        for pool, pages in zip(self.pools, sequence.pages, strict=True):
            pool.release(pages[back:])
            del pages[back:]
        sequence.evicted += held - kept
        sequence.covered = 0
        return f"{held - kept} of {held} tokens evicted"

    def _known(self, sequence: Sequence, computed: int, evicted: int) -> int:
        """Tokens that it holds after its next step, when so many are computed and evicted."""
        known = len(sequence.token_ids) - evicted
        left = None if self.budget is None else self.budget.left(sequence.prompt_length, computed, evicted)
        return known if left is None else min(known, computed - evicted + left)

    def _stop(self, table: Table, computed: int, known: int) -> int:
        """How long the list of pages must be for the next step."""
        end = known if table.back is None else min(known, computed + self.chunk)
        return pages_for(table.settled(end), self.size)

    def _idle(self, offer: Offer, table: int) -> int:
        return sum(page in self.pools[table].idle for page in offer.pages[table])

    def _allocate(self, table: int, count: int) -> list[int]:
        pool = self.pools[table]
        if self.prefix is not None:
            if pool.free < count:
                self.prefix.evict(table, count - pool.free, self.moves)
            for t, page in self.prefix.freed():
                self.moves.forget(t, {page})
        return pool.allocate(count)

    def _copy(self, sequence: Sequence, table: int, page: int, target: int) -> None:
        """`target` becomes what `page` is, or is to become."""
        place = self.moves.place(table, page)
        if place is None:
            self.moves.copies.append((table, page, target))
        else:
            self.moves.loads.append((sequence.request_id, table, place, target))

    def _enter(self, sequence: Sequence) -> None:
        if self.prefix is None:
            return
        ids, salt = sequence.token_ids, sequence.request.cache_salt
        for t, place, page in self.prefix.enter(sequence.order, ids, salt, sequence.computed, sequence.pages):
            self.pools[t].release([sequence.pages[t][place]])
            sequence.pages[t][place] = page

    def _restore(self, sequence: Sequence, saved: Saved) -> None:
        pages: list[list[int]] = []
        for t, places in enumerate(saved.places):
            fresh = self._allocate(t, sum(place != NULL_PAGE for place in places))
            pages.append([NULL_PAGE if place == NULL_PAGE else fresh.pop(0) for place in places])
        sequence.pages, sequence.saved = tuple(pages), None
        self.host.load(sequence, saved, self.moves)
        sequence.computed, sequence.evicted = saved.computed, saved.evicted
        sequence.covered = sequence.due = 0
        sequence.restored_tokens += saved.computed

    def _written(self, sequence: Sequence) -> list[list[int]]:
        """The pages of `sequence`, by table, in which something stands."""
        return [
            pages[: pages_for(table.settled(sequence.held), self.size)]
            for table, pages in zip(self.tables, sequence.pages, strict=True)
        ]
