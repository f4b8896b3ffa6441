"""Count the pages that sequences need, and compare the counts with the available pages. Integers only."""

from __future__ import annotations

from collections.abc import Sequence as Many

from workbench.kv_cache.budget import EvictionBudget
from workbench.kv_cache.pages import NULL_PAGE, KVCacheGroup, PagePool
from workbench.kv_cache.prefix import PrefixMatch, RadixCache
from workbench.request import Sequence


class KVCacheAccounting:
    """The counts of pages that sequences need, compared with the available pages; it changes nothing.

    `max_chunk_tokens` is the maximum number of tokens that a step computes for one sequence, drafts excluded. A group
    with a sliding window never has pages further ahead than that, so a sequence never holds more than
    `KVCacheGroup.max_pages`, however long the prompt. `peak_pages` relies on this before a request is admitted.

    `prefix_cache` has the cached pages; `budget` limits a sequence's tokens under eviction.
    """

    def __init__(
        self,
        pools: Many[PagePool],
        groups: Many[KVCacheGroup],
        max_chunk_tokens: int,
        prefix_cache: RadixCache | None = None,
        budget: EvictionBudget | None = None,
    ):
        if len(pools) != len(groups):
            raise ValueError(f"{len(pools)} pools for {len(groups)} tables")
        self.pools, self.groups, self.max_chunk_tokens = tuple(pools), tuple(groups), max_chunk_tokens
        self.prefix_cache, self.budget, self.page_size = prefix_cache, budget, self.pools[0].page_size
        self.recurrent_groups = tuple(t for t, table in enumerate(self.groups) if table.is_recurrent)

    def peak_pages(self, num_tokens: int, num_prompt_tokens: int, num_sequences: int = 1) -> list[int]:
        """Return the maximum number of pages, by cache group, that `num_sequences` sequences of `num_tokens` tokens
        need at once. The sequences share their first `num_prompt_tokens` tokens except the last of these.
        """
        if self.budget is not None:
            num_tokens = self.budget.peak_tokens(num_prompt_tokens, num_tokens)
        counts = []
        for table in self.groups:
            shared = (
                table.quantized_until(num_prompt_tokens - 1) // self.page_size if table.sliding_window is None else 0
            )
            counts.append(
                num_sequences * table.max_pages(num_tokens, self.max_chunk_tokens, self.page_size)
                - (num_sequences - 1) * shared
            )
        return counts

    def match_prefix(self, sequence: Sequence) -> PrefixMatch:
        """Return the cached prefix that `sequence` could start from now."""
        if self.prefix_cache is None or sequence.swapped is not None or sequence.num_computed_tokens:
            return PrefixMatch(0, tuple([] for _ in self.groups))
        ids = sequence.token_ids
        if (shared := sequence.num_shared_by_children) is not None:  # children start with this prefix and no more
            ids = ids[: 1 + shared]
        if sequence.num_scored_rows is not None:
            ids = ids[: 1 + sequence.num_scored_rows]
        return self.prefix_cache.match_prefix(ids, sequence.prefix_salt)

    def pages_to_start(self, sequence: Sequence, match: PrefixMatch) -> list[int]:
        """Return the number of pages to allocate, by cache group, so that `sequence` can start from `match` or from its
        swapped pages and run one step."""
        saved = sequence.swapped
        if sequence.num_computed_tokens:  # it was waiting and holds shared pages
            return self.pages_to_allocate(sequence) or [0] * len(self.groups)
        if saved is not None:
            computed, evicted, held = (
                saved.num_computed_tokens,
                saved.num_evicted_tokens,
                [len(places) for places in saved.cpu_pages],
            )
            here = [sum(place == NULL_PAGE for place in places) for places in saved.cpu_pages]
        else:
            computed, evicted, held = match.num_tokens, 0, [len(pages) for pages in match.pages]
            here = [match.num_resident_pages(t) for t in range(len(self.groups))]
        new = self.num_new_tokens(sequence, computed, evicted)
        computed -= evicted
        known = computed + new
        counts = []
        for t, table in enumerate(self.groups):
            if table.is_recurrent:
                counts.append(held[t] - here[t] + 1)
                continue
            place = table.quantized_until(computed) // self.page_size
            copied = saved is None and match.has_page(t, place)
            stop = table.num_pages(computed, known, self.max_chunk_tokens, self.page_size)
            counts.append(max(stop, held[t]) - here[t] + copied)
        return counts

    def pages_beyond_parent(self, child: Sequence) -> list[int]:
        """Return the number of pages to allocate, by cache group, for a child's next step; pages that it shares with
        its parent are not counted.
        """
        known, joins = len(child.token_ids), child.num_shared_tokens
        return [
            1
            if table.is_recurrent
            else max(
                1,
                table.num_pages(joins, known, self.max_chunk_tokens, self.page_size)
                - table.quantized_until(joins) // self.page_size,
            )
            for table in self.groups
        ]

    def pages_to_allocate(self, sequence: Sequence, num_draft_tokens: int = 0) -> list[int] | None:
        """Return the number of pages to allocate, by cache group, before the next step of a running sequence, which
        verifies `num_draft_tokens` draft tokens; None if no page is needed."""
        stored = sequence.num_stored_tokens
        known = stored + self.num_new_tokens(sequence, sequence.num_computed_tokens, sequence.num_evicted_tokens)
        drafts_states = self.recurrent_groups and num_draft_tokens
        if known + num_draft_tokens <= sequence.allocated_until and not drafts_states:
            return None
        counts = []
        for t, (table, pages, pool) in enumerate(zip(self.groups, sequence.pages, self.pools, strict=True)):
            if table.is_recurrent:
                spare = sequence.states[t].spare if t in sequence.states else ()
                counts.append(max(0, 1 + num_draft_tokens - len(spare)))
                continue
            stop = table.num_pages(stored, known, self.max_chunk_tokens, self.page_size, num_draft_tokens)
            place = table.quantized_until(stored) // self.page_size
            copied = place < len(pages) and pool.ref_count(pages[place]) > 1
            counts.append(max(0, stop - len(pages)) + copied)
        return counts

    def num_new_tokens(self, sequence: Sequence, computed: int, evicted: int) -> int:
        """Return the number of tokens that the next step may compute, given the numbers of computed and evicted
        tokens.
        """
        new = len(sequence.token_ids) - computed
        if self.budget is None:
            return new
        left = self.budget.tokens_until_eviction(sequence.prompt_length, computed, evicted)
        return new if left is None else min(new, left)

    def first_exhausted_group(self, counts: list[int], match: PrefixMatch | None = None) -> int | None:
        """Return the first cache group that has fewer available pages than its number in `counts`, those of `match`
        excluded; None if all groups have enough.
        """
        return next((t for t, count in enumerate(counts) if count > self.num_available(t, match)), None)

    def num_available(self, group: int, match: PrefixMatch | None = None) -> int:
        """Return the number of available pages of a cache group; the pages of `match` are not counted."""
        pool, matched = self.pools[group], () if match is None else match.pages[group]
        return pool.num_available - sum(page in pool.evictable for page in matched)
