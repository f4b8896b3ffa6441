"""Manage the pages of each sequence by the rules of its cache groups. Integers only.

    match_prefix, start -> allocate (a step) -> update_after_step (cache full pages, free unreachable ones) -> free
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace

from workbench.cache.budget import Budget
from workbench.cache.moves import Eviction, Moves
from workbench.cache.needs import Needs
from workbench.cache.pages import NULL_PAGE, PagePool, pages_for
from workbench.cache.places import Places
from workbench.cache.prefix import Offer, PrefixIndex
from workbench.cache.tables import Table
from workbench.request import Saved, Sequence


class Holdings(Needs):
    """The KV cache manager: it allocates, shares, preempts and frees pages, and plans their transfers."""

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
        super().__init__(pools, tables, chunk, prefix, budget)
        self.host, self.saves, self.moves = Places(host, prefix), saves, Moves()

    def drain(self) -> Moves:
        """Return the transfers that the step being planned begins with, and start an empty list."""
        moves, self.moves = self.moves, Moves()
        return moves

    def carried_out(self) -> None:
        """Release CPU pages whose swap-in the last step executed."""
        self.host.carried_out()

    def begin(self, sequence: Sequence, offer: Offer) -> None:
        """Give `sequence` the matched or swapped pages; pages for its next step are still to be allocated."""
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
        """Share the computed pages of `parent` with `child`, and return their number. The first write to the last
        page copies it."""
        follower.pages = tuple(self._written(leader))
        for pool, pages in zip(self.pools, follower.pages, strict=True):
            pool.share(page for page in pages if page != NULL_PAGE)
        if self.prefix is not None:
            self.prefix.fork(leader.order, follower.order, leader.computed)
        follower.computed = leader.computed
        follower.covered = follower.due = leader.covered = 0
        return sum(page != NULL_PAGE for pages in follower.pages for page in pages)

    def take(self, sequence: Sequence, drafted: int = 0) -> None:
        """Allocate the missing pages; copy a shared page that will be written (copy on write)."""
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
        """Free pages that hold only rejected draft tokens."""
        for table, pages, pool in zip(self.tables, sequence.pages, self.pools, strict=True):
            known = self._known(sequence, sequence.computed, sequence.evicted)
            stop = self._stop(table, sequence.held, known)
            if len(pages) > stop:
                pool.release(pages[stop:])
                del pages[stop:]
                sequence.covered = 0

    def settle(self, sequence: Sequence) -> None:
        """Update pages after a step: cache the full ones, free those that no query can reach any more."""
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
        """Preempt `sequence`: free its pages, swapped out where the CPU has room; return the number swapped out."""
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
        """Free a finished sequence; if it is `failed`, drop what it cached. Return the freed pages by group."""
        dropped = self.prefix.end(sequence.order, broken) if self.prefix is not None else [[] for _ in self.pools]
        return [ours + theirs for ours, theirs in zip(dropped, self.release(sequence), strict=True)]

    def release(self, sequence: Sequence) -> list[list[int]]:
        """Free all pages of `sequence`; return those that have no other reference, by group."""
        freed: list[list[int]] = [[] for _ in self.pools]
        if self.prefix is not None:
            self.prefix.leave(sequence.order)
        for t, (pool, pages) in enumerate(zip(self.pools, sequence.pages, strict=True)):
            # The last first: a page is dropped before its predecessors.
            now = pool.release(page for page in reversed(pages) if page != NULL_PAGE)
            self.moves.forget(t, set(now))
            freed[t] += now
        if sequence.saved is not None:
            self.host.release(sequence.saved)
        sequence.pages, sequence.saved = tuple([] for _ in self.pools), None
        sequence.computed = sequence.evicted = sequence.covered = sequence.due = 0
        return freed

    def evict(self, sequence: Sequence) -> str:
        """Evict tokens beyond the budget before the next step, and return the reason; the policy chooses them at
        execution."""
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

    def _allocate(self, table: int, count: int) -> list[int]:
        pool = self.pools[table]
        if self.prefix is not None:
            if pool.free < count:
                self.prefix.evict(table, count - pool.free, self.moves)
            for t, page in self.prefix.freed():
                self.moves.forget(t, {page})
        return pool.allocate(count)

    def _copy(self, sequence: Sequence, table: int, page: int, target: int) -> None:
        """Plan a copy of `page`, or of the CPU page that it is still to be loaded from, to `target`."""
        place = self.moves.place(table, page)
        if place is None:
            self.moves.copies.append((table, page, target))
        else:
            self.moves.loads.append((sequence.request_id, table, place, target))

    def _enter(self, sequence: Sequence) -> None:
        if self.prefix is None:
            return
        ids, salt, before = sequence.token_ids, sequence.request.cache_salt, self.prefix.written_tokens
        for t, place, page in self.prefix.enter(sequence.order, ids, salt, sequence.computed, sequence.pages):
            self.pools[t].release([sequence.pages[t][place]])
            sequence.pages[t][place] = page
        sequence.written_tokens += self.prefix.written_tokens - before

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
        """Return the pages of `sequence` that hold something, by group."""
        return [
            pages[: pages_for(table.settled(sequence.held), self.size)]
            for table, pages in zip(self.tables, sequence.pages, strict=True)
        ]
