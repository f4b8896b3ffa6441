"""Manage the pages of each sequence by the rules of its cache groups. Integers only.

match_prefix, start -> allocate (a step) -> update_after_step (cache full pages, free unreachable ones) -> free
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace

from workbench.kv_cache.accounting import KVCacheAccounting
from workbench.kv_cache.budget import EvictionBudget
from workbench.kv_cache.cpu_pages import CPUPagePool
from workbench.kv_cache.pages import NULL_PAGE, Eviction, KVCacheGroup, PagePool, PageTransfers, pages_for
from workbench.kv_cache.prefix import PrefixMatch, RadixCache
from workbench.kv_cache.recurrent import commit_states, snapshot_places
from workbench.kv_cache.settings import PreemptionMode
from workbench.request import Sequence, StatePages, SwappedPages
from workbench.trace.events import PinnedPrefix

UNLIMITED = 2**62  # tokens


class KVCacheManager(KVCacheAccounting):
    """The KV cache manager: it allocates, shares, preempts and frees pages, and plans their transfers."""

    def __init__(
        self,
        pools: Many[PagePool],
        groups: Many[KVCacheGroup],
        max_chunk_tokens: int,
        prefix_cache: RadixCache | None = None,
        cpu_pools: Many[PagePool] = (),
        budget: EvictionBudget | None = None,
        preemption_mode: PreemptionMode = "auto",
    ):
        super().__init__(pools, groups, max_chunk_tokens, prefix_cache, budget)
        self.cpu_pages, self.preemption_mode, self.transfers = (
            CPUPagePool(cpu_pools, prefix_cache),
            preemption_mode,
            PageTransfers(),
        )

    def pop_transfers(self) -> PageTransfers:
        """Return the transfers that the step being planned begins with, and start an empty list."""
        moves, self.transfers = self.transfers, PageTransfers()
        return moves

    def transfers_done(self) -> None:
        """Release CPU pages whose swap-in the last step executed."""
        if self.transfers.swap_ins:  # transfers of a failed plan: the next step executes them
            return
        if self.cpu_pages.swapping_in or self.cpu_pages.fetched:
            self.cpu_pages.transfers_done()

    def start(self, sequence: Sequence, match: PrefixMatch) -> None:
        """Give `sequence` the pages of `match`, or its swapped pages; `allocate` then adds the pages for its next
        step.
        """
        if sequence.swapped is not None:
            self._restore(sequence, sequence.swapped)
            return
        if sequence.num_computed_tokens:
            return
        sequence.pages = tuple(list(pages) for pages in match.pages)
        if self.prefix_cache is not None:
            self.prefix_cache.acquire(sequence.arrival_index, match)
            places = self.prefix_cache.take_cpu_pages(match)
            for (t, at, node), place in zip(match.on_cpu, places, strict=True):
                page = sequence.pages[t][at] = self.allocate_pages(t, 1)[0]
                self.transfers.swap_ins.append((sequence.request_id, t, place, page))
                self.prefix_cache.attach_page(sequence.arrival_index, node, t, page)
                self.cpu_pages.fetched.append((t, place))
        sequence.num_computed_tokens = match.num_tokens
        sequence.allocated_until = sequence.next_page_boundary = 0
        sequence.cached_tokens += match.num_tokens
        sequence.shared_pages += match.num_shared_pages

    def fork(self, parent: Sequence, child: Sequence) -> int:
        """Share the computed pages of `parent` with `child`, and return their number. The first write to the last
        page copies it."""
        child.pages = tuple(self._written(parent))
        for pool, pages in zip(self.pools, child.pages, strict=True):
            pool.acquire(page for page in pages if page != NULL_PAGE)
        if self.prefix_cache is not None:
            self.prefix_cache.fork(parent.arrival_index, child.arrival_index, parent.num_computed_tokens)
        child.num_computed_tokens = parent.num_computed_tokens
        child.allocated_until = child.next_page_boundary = parent.allocated_until = 0
        return sum(page != NULL_PAGE for pages in child.pages for page in pages)

    def allocate(self, sequence: Sequence, num_draft_tokens: int = 0) -> None:
        """Allocate the pages that the next step of `sequence` lacks, and copy a shared page that it will write (copy on
        write).
        """
        counts = self.pages_to_allocate(sequence, num_draft_tokens)
        if counts is None:
            return
        covered = []
        for t, (table, pages, pool) in enumerate(zip(self.groups, sequence.pages, self.pools, strict=True)):
            fresh = self.allocate_pages(t, counts[t])
            if table.is_recurrent:
                sequence.states.setdefault(t, StatePages()).spare += fresh
                continue
            place = table.quantized_until(sequence.num_stored_tokens) // self.page_size
            if place < len(pages) and pool.ref_count(pages[place]) > 1:
                self.transfers.copy(sequence.request_id, t, pages[place], fresh[0])
                pool.release([pages[place]])
                pages[place] = fresh.pop(0)
            pages.extend(fresh)
            covered.append(len(pages) * self.page_size + table.residual_length + table.quant_group - 1)
        covers = min(covered, default=UNLIMITED)
        sequence.allocated_until = covers if sequence.num_new_tokens <= self.max_chunk_tokens else 0

    def allocate_snapshots(self, sequence: Sequence, start: int, known: int) -> None:
        """Allocate pages for state snapshots at page ends within a step over [start, known), as far as free pages
        allow.
        """
        if self.prefix_cache is None:
            return
        for t in self.recurrent_groups:
            snapshots = sequence.states[t].snapshots
            for place in reversed(snapshot_places(start, known, self.page_size)):
                if place not in snapshots and self.pools[t].num_available:
                    snapshots[place] = self.allocate_pages(t, 1)[0]

    def commit_states(self, sequence: Sequence, start: int, known: int, end: int) -> None:
        """Keep the recurrent states that a step over [start, end) wrote: see `recurrent.commit_states`."""
        for t in self.recurrent_groups:
            commit_states(sequence, t, self.pools[t], start, known, end, self.page_size)

    def free_rejected_drafts(self, sequence: Sequence) -> None:
        """Free pages that hold only rejected draft tokens."""
        stored = sequence.num_stored_tokens
        known = stored + self.num_new_tokens(sequence, sequence.num_computed_tokens, sequence.num_evicted_tokens)
        for table, pages, pool in zip(self.groups, sequence.pages, self.pools, strict=True):
            stop = table.num_pages(stored, known, self.max_chunk_tokens, self.page_size)
            if len(pages) > stop:
                pool.release(pages[stop:])
                del pages[stop:]
                sequence.allocated_until = 0

    def update_after_step(self, sequence: Sequence) -> None:
        """Update the pages of a sequence after a step: cache full pages, and free pages that no later query reads."""
        if sequence.num_computed_tokens < sequence.next_page_boundary:
            return
        self._cache_full_pages(sequence)
        for table, pages, pool in zip(self.groups, sequence.pages, self.pools, strict=True):
            unreachable = table.out_of_window_pages(sequence.num_computed_tokens, self.page_size)
            begin = unreachable.stop
            while begin > unreachable.start and (pages[begin - 1] != NULL_PAGE or table.is_recurrent):
                begin -= 1
            if begin < unreachable.stop:
                pool.release(page for page in pages[begin : unreachable.stop] if page != NULL_PAGE)
                pages[begin : unreachable.stop] = [NULL_PAGE] * (unreachable.stop - begin)
        sequence.next_page_boundary = min(
            table.next_page_boundary(sequence.num_computed_tokens, self.page_size) for table in self.groups
        )

    def preempt(self, sequence: Sequence) -> int:
        """Preempt `sequence`: swap its pages out if there are CPU pages for them, free them, and return the number
        swapped out.
        """
        saved = self.cpu_pages.cancel_swap_in(sequence)
        if saved is None:
            saved = (
                None
                if self.preemption_mode == "recompute"
                else self.cpu_pages.swap_out(sequence.num_computed_tokens, self._written(sequence), self.transfers)
            )
        else:
            sequence.restored_tokens -= saved.num_computed_tokens
        if saved is not None:
            saved = replace(saved, num_evicted_tokens=sequence.num_evicted_tokens)
        self.free(sequence)
        sequence.swapped = saved
        return 0 if saved is None else sum(place != NULL_PAGE for places in saved.cpu_pages for place in places)

    def finish(self, sequence: Sequence, failed: bool = False) -> list[list[int]]:
        """Free a finished sequence; if it `failed`, drop the pages that it cached. Return the freed pages by group."""
        dropped = (
            self.prefix_cache.finish(sequence.arrival_index, failed)
            if self.prefix_cache is not None
            else [[] for _ in self.pools]
        )
        return [ours + theirs for ours, theirs in zip(dropped, self.free(sequence), strict=True)]

    def free(self, sequence: Sequence) -> list[list[int]]:
        """Free all pages of `sequence`; return, by cache group, the pages that no other reference keeps."""
        freed: list[list[int]] = [[] for _ in self.pools]
        if self.prefix_cache is not None:
            self.prefix_cache.release(sequence.arrival_index)
        for t, (pool, pages) in enumerate(zip(self.pools, sequence.pages, strict=True)):
            # In reverse order: a page is evicted before its predecessors.
            own = [page for page in reversed(pages) if page != NULL_PAGE]
            now = pool.release(own + sequence.states[t].all if t in sequence.states else own)
            self.transfers.drop_targets(t, set(now))
            freed[t] += now
        if sequence.swapped is not None:
            self.cpu_pages.release(sequence.swapped)
        sequence.pages, sequence.swapped, sequence.states = tuple([] for _ in self.pools), None, {}
        sequence.num_computed_tokens = sequence.num_evicted_tokens = sequence.allocated_until = (
            sequence.next_page_boundary
        ) = 0
        return freed

    def export_pages(self, sequence: Sequence, computed: int | None = None) -> tuple[tuple[int, ...], ...]:
        """Return the pages that another engine needs to continue `sequence`: by cache group the pages that its next
        query reads, and NULL_PAGE in place of all other pages. The sequence keeps its references.

        Args:
            sequence: the sequence.
            computed: within a step, the number of computed tokens after it; None: the present number.
        """
        end, found = sequence.num_computed_tokens if computed is None else computed, []
        for t, (table, pages) in enumerate(zip(self.groups, sequence.pages, strict=True)):
            if computed is not None and table.is_recurrent:
                pages = [NULL_PAGE] * ((end - 1) // self.page_size) + sequence.states[t].spare[:1]
            read = {place for places in table.pages_needed(end, end, self.page_size) for place in places}
            last = pages_for(table.quantized_until(end), self.page_size)
            found.append(tuple(page if place in read else NULL_PAGE for place, page in enumerate(pages[:last])))
        return tuple(found)

    def import_pages(self, sequence: Sequence, num_computed_tokens: int, pages: Many[Many[int]]) -> None:
        """Start a new sequence on pages that another engine computed, as if this engine had computed them.

        Args:
            sequence: the sequence to submit next. While it waits it holds the pages, and may lose them like any waiting
                sequence; then it is computed again.
            num_computed_tokens: number of tokens with keys and values in the pages, now or before the next step.
            pages: by cache group in the layout of `export_pages`; the sequence takes over a reference of each.
        """
        sequence.pages = tuple(map(list, pages))
        sequence.num_computed_tokens = num_computed_tokens
        sequence.allocated_until = sequence.next_page_boundary = 0

    def evict(self, sequence: Sequence) -> str:
        """Plan the eviction of tokens beyond the budget before the next step, and return the reason; the policy chooses
        the tokens when the plan is executed.
        """
        if self.budget is None:
            return ""
        held = sequence.num_stored_tokens
        kept = self.budget.tokens_to_keep(
            sequence.prompt_length, sequence.num_computed_tokens, sequence.num_evicted_tokens
        )
        if kept is None:
            return ""
        self.transfers.evictions.append(Eviction(sequence, held, kept, tuple(list(pages) for pages in sequence.pages)))
        back = pages_for(kept, self.page_size)
        for pool, pages in zip(self.pools, sequence.pages, strict=True):
            pool.release(pages[back:])
            del pages[back:]
        sequence.num_evicted_tokens += held - kept
        sequence.allocated_until = 0
        return f"{held - kept} of {held} tokens evicted"

    def allocate_pages(self, table: int, count: int) -> list[int]:
        """Allocate `count` pages of a cache group, each with one reference; if too few are free, the prefix cache
        evicts pages.
        """
        pool = self.pools[table]
        if self.prefix_cache is not None:
            if pool.num_free < count:
                self.prefix_cache.evict(table, count - pool.num_free, self.transfers)
            for t, page in self.prefix_cache.pop_freed():
                self.transfers.drop_targets(t, {page})
        return pool.allocate(count)

    def _cache_full_pages(self, sequence: Sequence) -> None:
        if self.prefix_cache is None:
            return
        ids, salt, before = sequence.token_ids, sequence.prefix_salt, self.prefix_cache.written_tokens
        for t, place, page in self.prefix_cache.insert(
            sequence.arrival_index, ids, salt, sequence.num_computed_tokens, sequence.pages
        ):
            self.pools[t].release([sequence.pages[t][place]])
            sequence.pages[t][place] = page
        sequence.written_tokens += self.prefix_cache.written_tokens - before
        for pin in sequence.request.pins[len(sequence.pinned) :]:
            if sequence.num_computed_tokens < pin.tokens // self.page_size * self.page_size:
                break
            kept = self.prefix_cache.pin(ids[: pin.tokens], salt, pin.seconds)
            sequence.pinned.append(PinnedPrefix(*pin, kept))

    def _restore(self, sequence: Sequence, swapped: SwappedPages) -> None:
        pages: list[list[int]] = []
        for t, places in enumerate(swapped.cpu_pages):
            fresh = self.allocate_pages(t, sum(place != NULL_PAGE for place in places))
            pages.append([NULL_PAGE if place == NULL_PAGE else fresh.pop(0) for place in places])
        sequence.pages, sequence.swapped = tuple(pages), None
        self.cpu_pages.swap_in(sequence, swapped, self.transfers)
        sequence.num_computed_tokens, sequence.num_evicted_tokens = (
            swapped.num_computed_tokens,
            swapped.num_evicted_tokens,
        )
        sequence.allocated_until = sequence.next_page_boundary = 0
        sequence.restored_tokens += swapped.num_computed_tokens

    def _written(self, sequence: Sequence) -> list[list[int]]:
        """Return the pages of `sequence` that hold keys and values, by group."""
        return [
            pages[: pages_for(table.quantized_until(sequence.num_stored_tokens), self.page_size)]
            for table, pages in zip(self.groups, sequence.pages, strict=True)
        ]
