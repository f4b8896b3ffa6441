"""Which tokens the next step computes: continuous batching (Orca), first come first served.

Integers only, so that thousands of histories are tested in a second and the same scheduler drives a real
model or a simulated one.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from workbench.cache.holdings import Holdings
from workbench.cache.pages import NULL_PAGE, PagePool
from workbench.cache.prefix import Offer
from workbench.engine.plan import Decision, Span, StepPlan
from workbench.engine.trials import with_drafts
from workbench.errors import WorkbenchError
from workbench.request import FinishReason, Sequence


class Refusal(WorkbenchError):
    """A request that could never run, with the numbers."""


@dataclass(frozen=True)
class Limits:
    max_num_seqs: int = 16  # sequences that run at once
    max_num_batched_tokens: int = 512  # tokens a step computes at most

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1 or self.max_num_batched_tokens < 1:
            raise WorkbenchError("max_num_seqs and max_num_batched_tokens must be at least 1")


class Scheduler:
    """Owns every sequence from submission to its end; `holdings` knows which pages each holds.

        submit -> waiting --admitted--> running --finished--> gone
                     ^                     |
                     +----- set back ------+     (the youngest, when pages run out)

    A sequence may have followers, which begin on its pages once it has computed what they have in common: samples of
    one prompt, or the beams of a search that was set back. Those for whom there is no place by then wait on these
    pages, which the oldest of them holds until somebody needs them more. Mates, the beams of one search, are set back
    together: alone, one would come back without the pages that they share, and the others would wait for it on theirs.

    Both queues are kept in arrival order, and the oldest of those that wait is admitted first, so the oldest gets on
    (with the decodes, once its prefill is done) and nobody starves. `plan` hands pages out; `commit` moves `computed`
    forward and gives back pages that no query reaches any more.
    """

    def __init__(self, holdings: Holdings, limits: Limits, context: int):
        self.holdings = holdings
        self.limits = limits
        self.context = context
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._steps = 0
        self._told = ("", "")  # who was last told to wait, and why

    @property
    def pools(self) -> tuple[PagePool, ...]:
        return self.holdings.pools

    @property
    def pages_used(self) -> int:
        return sum(pool.used for pool in self.pools)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def submit(self, sequence: Sequence, followers: Iterable[Sequence] = (), together: bool = False) -> None:
        """Queue `sequence`, or refuse it at once when it can never fit. `followers` are further samples of its
        request: they begin where its prefill ends, on its pages. `together`: they are mates."""
        family = [sequence, *followers]
        prompt, most = sequence.prompt_length, sequence.request.sampling.max_tokens
        if prompt + 1 > self.context:
            raise Refusal(
                f"request {sequence.request_id}: {prompt} prompt tokens leave no room in a context of "
                f"{self.context}; shorten the prompt or set overflow: cut_oldest"
            )
        # The last token of all is never read back, so its keys and values need no room.
        count = len(family) if together else 1
        if count > self.limits.max_num_seqs:
            raise Refusal(
                f"request {sequence.request_id}: {count} beams, and max_num_seqs is {self.limits.max_num_seqs}; raise "
                "it or ask for fewer beams"
            )
        alone = self.holdings.budget is not None  # evicting moves what lies in pages: nobody shares them
        if together and alone:
            raise Refusal(f"request {sequence.request_id}: beams share pages, and cache.evict moves what is in them")
        needed = self.holdings.at_once(min(prompt + most, self.context) - 1, prompt, count)
        for table, (pages, pool) in enumerate(zip(needed, self.pools, strict=True)):
            if pages > pool.pages:
                back = self.holdings.tables[table].back
                seen = "" if back is None else f" at once in layers that see {back}"
                raise Refusal(
                    f"request {sequence.request_id}: {prompt} prompt tokens and up to {most} more"
                    f"{f', in {count} beams,' if count > 1 else ''} need {pages} "
                    f"pages of {pool.page_size} tokens{seen}, the cache has {pool.pages}; lower max_tokens or raise "
                    "cache.pages"
                )
        if together:
            for mate in family:
                mate.mates = family
        for leader, *rest in [[each] for each in family] if alone else [family]:
            self._wait(leader, *rest)

    def plan(self, proposed: Mapping[str, tuple[int, ...]] | None = None) -> StepPlan | None:
        """The next step's spans, or None when there is nothing to do. Pages are taken here. Tokens `proposed` for a
        sequence's next positions are checked as far as the step has room."""
        self.holdings.carried_out()
        decisions: list[Decision] = []
        for sequence in self.running:
            if reason := self.holdings.evict(sequence):
                decisions.append(Decision(sequence.request_id, "evicted", reason))
        self._fork(decisions)
        if self._grow(decisions):
            self._admit(decisions)
            if self._fork(decisions):  # a leader with nothing before its prompt's last token
                self._grow(decisions)
        spans = self._spans(decisions)
        if not spans:
            return None
        if proposed:
            spans = with_drafts(spans, proposed, self.holdings, self.limits.max_num_batched_tokens)
        plan = StepPlan(self._steps, spans, tuple(decisions), self.holdings.drain())
        self._steps += 1
        return plan

    def commit(
        self, plan: StepPlan, chosen: Mapping[str, int], standing: Mapping[str, tuple[int, ...]] | None = None
    ) -> None:
        """The step was computed; `chosen` gives each sampled sequence its next token, after those of its drafted tokens
        that are `standing`. What was computed for the others is forgotten, and their pages are given back."""
        for span in plan.spans:
            sequence = span.sequence
            if sequence.finish_reason is None:
                accepted = standing.get(sequence.request_id, ()) if standing else ()
                sequence.computed = span.end - len(span.drafts) + len(accepted)
                sequence.computed_tokens += span.length
                if sequence.request_id in chosen:
                    sequence.token_ids += [*accepted, chosen[sequence.request_id]]
                if span.drafts:
                    self.holdings.cut(sequence)
                self.holdings.settle(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> list[list[int]]:
        """End `sequence`, whether it runs or waits; its pages are free at once. Returns them, by table."""
        if sequence.finish_reason is not None:
            return []
        sequence.finish_reason = reason
        if sequence.mates:
            sequence.mates.remove(sequence)
        if sequence.leader is not None:
            sequence.leader.followers.remove(sequence)
            return []
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        if sequence.followers:  # the next sample leads the others
            heirs, sequence.followers = sequence.followers, []
            self._wait(*heirs)
        return self.holdings.release(sequence, broken=reason is FinishReason.ERROR)

    def branch(self, mates: list[Sequence], going: list[tuple[Sequence, int]]) -> list[Sequence]:
        """Between two steps, when all `mates` have computed what they know: each of `going` is one of them, whose text
        goes on, and its next token. Returns who does so, in that order: the mate itself, and for a second token of the
        same text one whose own goes nowhere, which gives up its pages and holds that text's."""
        parents = {id(parent) for parent, _ in going}
        idle = [mate for mate in mates if id(mate) not in parents]
        heirs: list[Sequence] = []
        for parent, _ in going:
            heir = parent
            if parent in heirs:
                heir = idle.pop()
                self.holdings.release(heir)
                heir.token_ids = list(parent.token_ids)
                self.holdings.fork(parent, heir)
            heirs.append(heir)
        for heir, (_, token) in zip(heirs, going, strict=True):
            heir.token_ids.append(token)
        return heirs

    def _wait(self, leader: Sequence, *followers: Sequence) -> None:
        if not leader.pages:
            leader.pages = tuple([] for _ in self.pools)
        leader.leader, leader.followers = None, list(followers)
        for follower in followers:
            follower.leader, follower.followers, follower.pages = leader, [], tuple([] for _ in self.pools)
            follower.joins = min(_common(leader.token_ids, follower.token_ids), len(follower.token_ids) - 1)
        bisect.insort(self.waiting, leader, key=lambda waiting: waiting.order)

    def _fork(self, decisions: list[Decision]) -> bool:
        """Followers join whose leader has computed what they have in common; whether any did."""
        forked = False
        for leader in [s for s in self.running if s.followers]:
            due = [follower for follower in leader.followers if follower.joins <= leader.computed]
            if not due:
                continue
            forked, leader.followers = True, [f for f in leader.followers if f.joins > leader.computed]
            places = max(0, self.limits.max_num_seqs - len(self.running))
            for follower in due[:places]:
                follower.leader = None
                shared = self.holdings.fork(leader, follower)
                follower.cached_tokens += follower.computed
                follower.shared_pages += shared
                bisect.insort(self.running, follower, key=lambda running: running.order)
                reason = f"admitted: shares {shared} pages with {leader.request_id}"
                decisions.append(Decision(follower.request_id, "admitted", reason))
            if late := due[places:]:
                self.holdings.fork(leader, late[0])
                self._wait(*late)
        return forked

    def _grow(self, decisions: list[Decision]) -> bool:
        """Pages for every running sequence's next step, oldest first; the youngest makes room. True if none had to."""
        holdings = self.holdings
        index, roomy = 0, True
        while index < len(self.running):
            sequence = self.running[index]
            missing = holdings.missing(sequence)
            short = holdings.short(missing) if missing is not None else None
            if missing is None or short is None:
                if missing is not None:
                    holdings.take(sequence)
                index += 1
                continue
            need = f"{sequence.request_id} needs {missing[short]} more pages, {holdings.available(short)} free"
            if not self._unshare(self.waiting, need, decisions):
                roomy = False
                self._set_back(need, decisions)
        return roomy

    def _set_back(self, need: str, decisions: list[Decision]) -> None:
        youngest = self.running.pop()
        reason = f"{need}; youngest gives way"
        if not youngest.mates:
            saved = self.holdings.set_back(youngest)
            reason += f", {saved} pages saved on the host" if saved else ""
            self._wait(youngest, *youngest.followers)
        for mate in youngest.mates:
            for queue in (self.running, self.waiting):
                if mate in queue:
                    queue.remove(mate)
            self.holdings.release(mate)  # not to the host: each would bring back pages of its own
        if youngest.mates:
            self._wait(*youngest.mates)
        for sequence in youngest.mates or [youngest]:
            sequence.set_backs += 1
            decisions.append(Decision(sequence.request_id, "set_back", reason))

    def _unshare(self, waiting: list[Sequence], need: str, decisions: list[Decision]) -> bool:
        """The youngest of those that wait on pages which they share gives them back; whether there was one."""
        holder = next((s for s in reversed(waiting) if s.computed), None)
        if holder is not None:
            self.holdings.release(holder)
            holder.set_backs += 1
            decisions.append(Decision(holder.request_id, "set_back", f"{need}; who waits gives way"))
        return holder is not None

    def _admit(self, decisions: list[Decision]) -> None:
        """Waiting sequences in order, each with pages for its next step, until one does not fit."""
        budget = self.limits.max_num_batched_tokens - sum(self.holdings.next_tokens(s) for s in self.running)
        places = self.limits.max_num_seqs - sum(1 + len(s.followers) for s in self.running)
        while self.waiting:
            sequence = self.waiting[0]
            offer = self.holdings.match(sequence) if places > 0 and budget > 0 else None
            reason, short = self._obstacle(sequence, places, budget, offer)
            if short and self._unshare(self.waiting[1:], reason, decisions):
                continue
            if reason or offer is None:
                if (sequence.request_id, reason) != self._told:  # not the same words every step
                    self._told = (sequence.request_id, reason)
                    decisions.append(Decision(sequence.request_id, "waiting", reason))
                return
            self.waiting.pop(0)
            bisect.insort(self.running, sequence, key=lambda running: running.order)
            decisions.append(Decision(sequence.request_id, "admitted", self._begin(sequence, offer)))
            budget -= self.holdings.next_tokens(sequence)
            places -= 1 + len(sequence.followers)

    def _obstacle(self, sequence: Sequence, places: int, budget: int, offer: Offer | None) -> tuple[str, bool]:
        """Why `sequence` cannot begin now, or nothing, and whether it lacks pages."""
        limits, come = self.limits, sum(len(s.followers) for s in self.running)
        if places <= 0:
            run = f"{len(self.running)} sequences run" + (f" and {come} are to join them" if come else "")
            return f"not admitted: {run}, max_num_seqs is {limits.max_num_seqs}", False
        if budget <= 0 or offer is None:
            return f"not admitted: the step's {limits.max_num_batched_tokens} tokens are taken", False
        lacks = self.holdings.lacks(sequence, offer)
        short = self.holdings.short(lacks, offer)
        if short is None:
            return "", False
        return f"not admitted: {lacks[short]} pages needed, {self.holdings.available(short, offer)} free", True

    def _begin(self, sequence: Sequence, offer: Offer) -> str:
        """Hand out the pages `sequence` begins with; what is to be said of it."""
        before = [pool.used for pool in self.pools]
        saved, waited = sequence.saved, sequence.computed
        sequence.cached_tokens += waited
        sequence.shared_pages += sum(page != NULL_PAGE for pages in sequence.pages for page in pages)
        self.holdings.begin(sequence, offer)
        self.holdings.take(sequence)
        taken = " + ".join(str(pool.used - used) for pool, used in zip(self.pools, before, strict=True))
        left = " + ".join(str(pool.available) for pool in self.pools)
        reason = f"admitted: {taken} pages taken, {left} left"
        if saved is not None:
            return f"{reason}; {saved.computed} tokens come back from the host"
        if waited:
            return f"{reason}; {waited} tokens stand in pages that it shares"
        if offer.tokens:
            reason += f"; {offer.tokens} tokens found in the cache, in {offer.shared} pages"
        return reason

    def _spans(self, decisions: list[Decision]) -> tuple[Span, ...]:
        """Decodes first, then prefill in order, cut where the step's budget ends."""
        budget = self.limits.max_num_batched_tokens
        spans: list[Span] = []
        longer: list[tuple[Sequence, int]] = []
        for sequence in self.running:
            wanted = self.holdings.next_tokens(sequence)
            if sequence.followers:  # the next of them joins there
                wanted = min(wanted, min(follower.joins for follower in sequence.followers) - sequence.computed)
            if wanted > 1:
                longer.append((sequence, wanted))
            elif wanted and budget:
                spans.append(Span.of(sequence, 1))
                budget -= 1
        cut: list[Span] = []
        for sequence, wanted in longer:
            length = min(wanted, budget)
            if length == 0:
                break
            if length < wanted:
                reason = f"prefill cut: {length} of {sequence.waiting_tokens} tokens fit into this step"
                decisions.append(Decision(sequence.request_id, "cut", reason))
            (spans if length == 1 else cut).append(Span.of(sequence, length))
            budget -= length
        return (*spans, *cut)


def _common(one: list[int], other: list[int]) -> int:
    """How many tokens two texts begin with that are the same."""
    if one == other:
        return len(one)
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
