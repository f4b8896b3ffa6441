"""Pages whose contents are only names: what a scheduler's plans would leave in a cache, checked at every read."""

from __future__ import annotations

from collections import Counter

from workbench.kv_cache.pages import NULL_PAGE, KVCacheGroup
from workbench.kv_cache.radix_tree import RadixNode
from workbench.kv_cache.recurrent import state_page, written_states
from workbench.request import Sequence
from workbench.scheduler.plan import Span, StepPlan
from workbench.scheduler.scheduler import Scheduler

Name = tuple[str, tuple[int, ...]]  # the salt and the tokens up to a position: what its keys and values depend on


class Memory:
    """Carries a plan out on pages of names. Asserts that a query finds what was computed for its own text, that
    nothing is written to a page with two holders, and that pages that were freed are never read."""

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self.manager = scheduler.kv_cache_manager
        self.size = self.manager.page_size
        self.pages: list[dict[int, dict[int, Name]]] = [{} for _ in self.manager.groups]
        self.host: list[dict[int, dict[int, Name]]] = [{} for _ in self.manager.groups]
        self.writers: list[dict[int, Sequence]] = [{} for _ in self.manager.groups]  # who wrote to a page last
        self.most_held = [0] * len(self.manager.groups)

    def move(self, plan: StepPlan) -> None:
        """Carry out the page moves that a step begins with; no page was written since the step was planned."""
        for t, page, place in plan.transfers.swap_outs:
            self.host[t][place] = dict(self.pages[t].get(page, {}))
        for t, page, target in plan.transfers.copies:
            self.pages[t][target] = dict(self.pages[t].get(page, {}))
        for _, t, place, page in plan.transfers.swap_ins:
            assert self.manager.cpu_pages.pools[t].ref_count(place), "a page on the CPU is read after it was given back"
            self.pages[t][page] = dict(self.host[t][place])

    def compute(self, plan: StepPlan) -> None:
        for span in plan.spans:
            span.sequence.token_ids.extend(span.draft_token_ids)  # known for as long as the step computes them
        for span in plan.spans:
            self._write(span.sequence, span.start, span.end)
            self._write_states(span)
        for span in plan.spans:
            self._quantize(span.sequence, span.start, span.end)
        for span in plan.spans:
            self._read(span.sequence, span.start, span.end)
        for span in plan.spans:
            del span.sequence.token_ids[len(span.sequence.token_ids) - len(span.draft_token_ids) :]
        self.forget_free()

    def forget_step(self, plan: StepPlan) -> None:
        """`plan` was interrupted. What it wrote to pages is written again, so there is nothing else to forget."""

    def spoil(self, broken: Sequence) -> None:
        """`broken` may have written anything to pages of its own: no later request may read them."""
        for t, pool in enumerate(self.manager.pools):
            own = broken.states[t].all if t in broken.states else []
            for page in [*broken.pages[t], *own]:
                alone = page != NULL_PAGE and pool.ref_count(page) == 1 + pool.is_cached(page)
                if alone and self.writers[t].get(page) is broken:
                    self.pages[t][page] = {}

    def forget_free(self) -> None:
        """A page without an owner has nothing in it, unless it is still to be saved or copied before the next step."""
        transfers = self.manager.transfers
        wanted = {(t, page) for t, page, _ in (*transfers.swap_outs, *transfers.copies)}
        for t, pool in enumerate(self.manager.pools):
            for page in [page for page in self.pages[t] if pool.ref_count(page) == 0 and (t, page) not in wanted]:
                del self.pages[t][page]

    def _name(self, sequence: Sequence, position: int) -> Name:
        return sequence.request.cache_salt, tuple(sequence.token_ids[: position + 1])

    def _write_states(self, span: Span) -> None:
        """A page of states has one name: that of the text after which it is the state."""
        sequence, known = span.sequence, span.num_known_tokens
        for t in self.manager.recurrent_groups:
            read = state_page(sequence.pages[t], span.start, self.size)
            written = written_states(sequence.states[t], span.start, known, span.end, self.size)
            assert written.keys() >= {*range(known, span.end + 1)}, "a state is written nowhere"
            for tokens, page in written.items():
                assert page != NULL_PAGE and page != read, "the state that a step reads is overwritten"
                assert self.manager.pools[t].ref_count(page) == 1, "a shared state is overwritten"
                self.pages[t][page] = {0: self._name(sequence, tokens - 1)}
                self.writers[t][page] = sequence

    def _read_state(self, sequence: Sequence, t: int, start: int) -> None:
        if start:
            found = self.pages[t].get(state_page(sequence.pages[t], start, self.size), {}).get(0)
            assert found == self._name(sequence, start - 1), f"a step from {start} on finds the state of {found}"
        self.most_held[t] = max(self.most_held[t], sum(page != NULL_PAGE for page in sequence.pages[t]))

    def _write(self, sequence: Sequence, start: int, end: int) -> None:
        for t, table in enumerate(self.manager.groups):
            if table.is_recurrent:
                continue
            for position in range(table.quantized_until(start), table.quantized_until(end)):
                page = sequence.pages[t][position // self.size]
                assert page != NULL_PAGE, "a token is written nowhere"
                assert self.manager.pools[t].ref_count(page) == 1, "a shared page is written to"
                self.pages[t].setdefault(page, {})[position % self.size] = self._name(sequence, position)
                self.writers[t][page] = sequence

    def _quantize(self, sequence: Sequence, start: int, end: int) -> None:
        """Copy late pages from the next group, which keeps them in full precision until then."""
        for t, table in enumerate(self.manager.groups):
            for position in range(table.quantized_until(start), table.quantized_until(end)) if table.is_delayed else ():
                page = sequence.pages[t + 1][position // self.size]
                assert page != NULL_PAGE, f"position {position} is to be quantized and its page was given back"
                found = self.pages[t + 1].get(page, {}).get(position % self.size)
                assert found == self._name(sequence, position), f"quantizing {position} finds {found}"

    def _read(self, sequence: Sequence, start: int, end: int) -> None:
        for t, table in enumerate(self.manager.groups):
            held = sequence.pages[t]
            if table.is_recurrent:
                self._read_state(sequence, t, start)
                continue
            for position, query in _seen(table, start, end).items():
                page = held[position // self.size]
                assert page != NULL_PAGE, f"query {query} needs position {position} of a page given back"
                found = self.pages[t].get(page, {}).get(position % self.size)
                assert found == self._name(sequence, position), f"query {query} finds {found} at {position}"
            live = sum(page != NULL_PAGE for page in held)
            self.most_held[t] = max(self.most_held[t], live)

    def check(self, live: list[Sequence]) -> None:
        """free + used + idle = all; holders are counted; only the index's pages are idle; the host loses nothing."""
        prefix = self.manager.prefix_cache
        kept = Counter((t, page) for node in nodes(prefix) for t, page in enumerate(node.pages) if page)
        for t, pool in enumerate(self.manager.pools):
            held = Counter(page for s in live for page in s.pages[t] if page != NULL_PAGE)
            held.update(page for s in live if t in s.states for page in s.states[t].all)
            assert pool.num_free + pool.num_used + len(pool.evictable) == pool.num_pages
            assert pool.num_used == len(held)
            for page in range(1, pool.num_pages + 1):
                assert kept[t, page] <= 1, "one page in two nodes"
                assert pool.ref_count(page) == held[page] + kept[t, page]
                assert (page in pool.evictable) == (kept[t, page] == 1 and held[page] == 0)
        for t, room in enumerate(self.manager.cpu_pages.pools):
            lying = [saved.cpu_pages[t] for s in live if (saved := s.swapped) is not None]
            lying += [saved.cpu_pages[t] for saved in self.manager.cpu_pages.swapping_in.values()]
            places = [place for mine in lying for place in mine if place != NULL_PAGE]
            places += [place for at, place in self.manager.cpu_pages.fetched if at == t]
            places += [node.cpu_pages[t] for node in nodes(prefix) if node.cpu_pages[t] != NULL_PAGE]
            assert len(places) == len(set(places)) == room.num_used
        for s in self.scheduler.waiting:
            assert (s.num_computed_tokens == 0) == (not any(any(pages) for pages in s.pages))


def _seen(table: KVCacheGroup, start: int, end: int) -> dict[int, int]:
    """The positions in a table's pages that queries from `start` to `end` see, each with one that sees it."""
    seen: dict[int, int] = {}
    for query in range(start, end):
        settled = table.quantized_until(query + 1)
        oldest = 0 if table.sliding_window is None else max(0, query - table.sliding_window + 1)
        while oldest % table.stride:  # the rest of that group is quantized
            oldest += 1
        for position in (*range(min(oldest, table.num_sink_tokens, settled)), *range(oldest, settled)):
            seen[position] = query
    return seen


def nodes(prefix) -> list[RadixNode]:
    """Every node of an index but its roots."""
    found, waiting = [], [] if prefix is None else list(prefix.tree.roots.values())
    while waiting:
        node = waiting.pop()
        waiting += node.children.values()
        found += [node] if node.parent is not None else []
    return found
