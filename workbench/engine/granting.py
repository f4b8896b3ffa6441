"""Carrying out what a policy wished: who gives way, who gets pages, who begins, and the words for it."""

from __future__ import annotations

import bisect
from collections.abc import Callable

from workbench.cache.holdings import Holdings
from workbench.cache.prefix import Offer
from workbench.engine.limits import Limits
from workbench.engine.plan import Decision
from workbench.engine.views import Views
from workbench.request import Sequence


class Granting:
    """One step's carrying out. `lengths` are the tokens that each sequence gets of it."""

    def __init__(
        self,
        holdings: Holdings,
        limits: Limits,
        views: Views,
        running: list[Sequence],
        wait: Callable[[Sequence], None],
        decisions: list[Decision],
    ):
        self.holdings, self.limits, self.views = holdings, limits, views
        self.running, self.decisions = running, decisions
        self.lengths: dict[Sequence, int] = {}
        self._wait = wait

    @property
    def left(self) -> int:
        return self.limits.max_num_batched_tokens - sum(self.lengths.values())

    @property
    def chunk_left(self) -> int:
        """Prefill tokens that this step may still compute."""
        return self.limits.chunk - sum(n for s, n in self.lengths.items() if n > 1 or s.waiting_tokens > 1)

    def set_back(self, sequence: Sequence, reason: str) -> None:
        """`sequence` gives all its pages and waits again."""
        self.running.remove(sequence)
        self.lengths.pop(sequence, None)
        self.views.forget_offers()
        saved = self.holdings.set_back(sequence)
        reason += f", {saved} pages saved on the host" if saved else ""
        sequence.set_backs += 1
        self._wait(sequence)
        self.decisions.append(Decision(sequence.request_id, "set_back", reason))

    def grow(self, order: list[Sequence]) -> bool:
        """Pages for those in `order` that get tokens of this step; the last in it makes room. True if none had to."""
        holdings, order, index, roomy = self.holdings, list(order), 0, True
        while index < len(order):
            sequence = order[index]
            if len(sequence.token_ids) <= sequence.covered or not self.lengths.get(sequence):
                index += 1
                continue
            missing = holdings.missing(sequence)
            short = holdings.short(missing) if missing is not None else None
            if missing is None or short is None:
                if missing is not None:
                    self.views.forget_offers()
                    holdings.take(sequence)
                index += 1
                continue
            last, roomy = order.pop(), False
            which = "the youngest" if last is self.running[-1] else "the last in turn"
            needs = f"{sequence.request_id} needs {missing[short]} more pages, {holdings.available(short)} free"
            self.set_back(last, f"{needs}; {which} gives way")
        return roomy

    def admit(self, sequence: Sequence, tokens: int, places: int) -> str:
        """`sequence` begins with up to `tokens` tokens; or why it cannot."""
        offer = self.views.offer(sequence) if places > 0 and self.left > 0 else None
        obstacle = self.obstacle(sequence, places, offer)
        if obstacle or offer is None:
            return obstacle
        todo = self._todo(len(sequence.token_ids) - _cached(sequence, offer), sequence)
        length = self._portion(min(tokens, todo), todo) if todo else 0
        if todo and not length:
            cut = "" if self.limits.chunked_prefill else ", and chunked_prefill is off"
            return f"not admitted: {todo} tokens to compute, {min(tokens, self.chunk_left)} of this step for it{cut}"
        self.decisions.append(Decision(sequence.request_id, "admitted", self._begin(sequence, offer)))
        bisect.insort(self.running, sequence, key=lambda running: running.order)
        self.lengths[sequence] = length
        return ""

    def give(self, sequence: Sequence, tokens: int) -> None:
        """`tokens` of this step for one that runs, no more than it has to compute."""
        todo = len(sequence.token_ids) - sequence.computed
        if todo > 1:
            todo = self._todo(todo, sequence)
            todo = self._portion(min(tokens, todo), todo)
        self.lengths[sequence] = todo

    def obstacle(self, sequence: Sequence, places: int, offer: Offer | None) -> str:
        """Why `sequence` cannot begin now, or nothing."""
        limits, come = self.limits, len(sequence.followers)
        if places < min(1 + come, limits.max_num_seqs):
            run = f"{len(self.running)} sequences run" + (f" and {1 + come} would come" if come else "")
            return f"not admitted: {run}, max_num_seqs is {limits.max_num_seqs}"
        if self.left <= 0 or offer is None:
            return f"not admitted: the step's {limits.max_num_batched_tokens} tokens are taken"
        lacks = self.holdings.lacks(sequence, offer)
        short = self.holdings.short(lacks, offer)
        if short is None:
            return ""
        return f"not admitted: {lacks[short]} pages needed, {self.holdings.available(short, offer)} free"

    def _todo(self, tokens: int, sequence: Sequence) -> int:
        return tokens - 1 if sequence.followers else tokens  # they join before the prompt's last token

    def _portion(self, length: int, todo: int) -> int:
        """`length` of `todo` prefill tokens, as far as a chunk goes; none where that would cut what must not be cut."""
        length = max(0, min(length, self.chunk_left))
        cut = length < todo <= self.limits.max_num_batched_tokens
        return 0 if cut and not self.limits.chunked_prefill else length

    def _begin(self, sequence: Sequence, offer: Offer) -> str:
        """Hand out the pages `sequence` begins with; what is to be said of it."""
        holdings, pools = self.holdings, self.holdings.pools
        before = [pool.used for pool in pools]
        saved = sequence.saved
        self.views.forget_offers()
        holdings.begin(sequence, offer)
        holdings.take(sequence)
        taken = " + ".join(str(pool.used - used) for pool, used in zip(pools, before, strict=True))
        left = " + ".join(str(pool.available) for pool in pools)
        reason = f"admitted: {taken} pages taken, {left} left"
        if saved is not None:
            return f"{reason}; {saved.computed} tokens come back from the host"
        if offer.tokens:
            reason += f"; {offer.tokens} tokens found in the cache, in {offer.shared} pages"
        return reason


def _cached(sequence: Sequence, offer: Offer) -> int:
    return sequence.saved.computed if sequence.saved is not None else offer.tokens
