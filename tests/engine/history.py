"""One history of scheduler, pages, prefix index and host: integers only, every read checked."""

from __future__ import annotations

import random
from typing import cast, get_args

from tests.engine.memory import Memory
from tests.engine.wild import Wild
from workbench.errors import WorkbenchError
from workbench.kv_cache.manager import KVCacheManager
from workbench.kv_cache.pages import KVCacheGroup, PagePool
from workbench.kv_cache.prefix import PrefixMatch, RadixCache
from workbench.request import FinishReason, Request, SamplingParameters, Sequence
from workbench.scheduler.limits import SchedulerLimits
from workbench.scheduler.plan import RequestRefused, StepPlan
from workbench.scheduler.policies import BUILT_IN_POLICIES, FCFS, BatchingMode, parse_policy
from workbench.scheduler.policy import SchedulingPolicy
from workbench.scheduler.scheduler import Scheduler

CONTEXT, SIZE, BUDGET, MAX_DRAFTS = 40, 4, 7, 4
FULL, WINDOW, SINKS = (
    KVCacheGroup((0,)),
    KVCacheGroup((1,), sliding_window=5),
    KVCacheGroup((1,), sliding_window=6, num_sink_tokens=3),
)
PACKED, RECENT = KVCacheGroup((0,), residual_length=5, quant_group=2), KVCacheGroup((0,), sliding_window=7, stride=2)
WHOLE_PACKED, WHOLE_RECENT = (
    KVCacheGroup((0,), residual_length=8, quant_group=4),
    KVCacheGroup((0,), sliding_window=12, num_sink_tokens=2, stride=4),
)
STATES = KVCacheGroup.of_states((2,))
LAYOUTS = [
    (FULL, STATES),
    (STATES,),
    (WINDOW, STATES, FULL),
    (FULL,),
    (FULL, WINDOW),
    (SINKS, FULL),
    (WINDOW,),
    (PACKED, RECENT),
    (FULL, WHOLE_PACKED, WHOLE_RECENT),
    (
        KVCacheGroup((0,), sliding_window=9, residual_length=3, quant_group=2),
        KVCacheGroup((0,), sliding_window=5, stride=2),
    ),
]


STOPS = [FinishReason.CANCELLED, FinishReason.STOP, FinishReason.ERROR]
POLICIES = (
    ["continuous fcfs"] * 4
    + [f"{kind} {name}" for kind in get_args(BatchingMode) for name in BUILT_IN_POLICIES]
    + ["wild"] * 4
)


def policy_of(name: str, seed: int) -> SchedulingPolicy:
    """With little patience, so that it is at an end in a short history."""
    if name == "wild":
        return Wild(seed)
    kind, _, policy = name.partition(" ")
    patience = {"starvation_limit": 12} if "starvation_limit" in BUILT_IN_POLICIES[policy].model_fields else {}
    return parse_policy({"kind": policy, **patience}, cast(BatchingMode, kind))


class Counted(KVCacheManager):
    """Checks that beginning takes the pages that were said to be lacking (a copied one's source is idle again)."""

    promised: list[int] | None = None

    def start(self, sequence: Sequence, match: PrefixMatch) -> None:
        lacks = self.pages_to_start(sequence, match)
        self.promised = [self.num_available(t, match) - count for t, count in enumerate(lacks)]
        super().start(sequence, match)

    def allocate(self, sequence: Sequence, num_draft_tokens: int = 0) -> None:
        super().allocate(sequence, num_draft_tokens)
        if self.promised is not None:
            for pool, promised in zip(self.pools, self.promised, strict=True):
                assert promised <= pool.num_available <= promised + 1
            self.promised = None


class History:
    """Submit, step, stop, evict, wait in any order, with or without an index and a host; `check` between them."""

    policy = "continuous fcfs"
    speculates = False

    def begin(
        self, policy: str, tables: tuple[KVCacheGroup, ...], pages: int, prefix: bool, saves: bool, host: int,
        ttl: float | None, seed: int,
    ) -> None:  # fmt: skip
        self.now, self.draw = 0.0, random.Random(seed)
        pools = tuple(PagePool(pages + t, SIZE) for t in range(len(tables)))
        cpu_pools = tuple(PagePool(host, SIZE) for _ in tables) if host else ()
        index = RadixCache(pools, tables, ttl, lambda: self.now, cpu_pools) if prefix else None
        whole = self.draw.random() < 0.25  # a prompt is computed in one step
        chunk = None if whole else self.draw.choice([None, None, 3])
        self.limits = SchedulerLimits(
            max_num_seqs=4, max_num_batched_tokens=BUDGET, chunk_tokens=chunk, chunked_prefill=not whole
        )
        self.manager = Counted(
            pools,
            tables,
            self.limits.max_chunk_tokens,
            index,
            cpu_pools,
            preemption_mode="auto" if saves else "recompute",
        )
        self.policy, self.speculates = policy, self.draw.random() < 0.5
        self.scheduler = Scheduler(self.manager, self.limits, CONTEXT, policy_of(policy, seed))
        self.memory = Memory(self.scheduler)
        self.open: list[Sequence] = []
        self.samples: set[Sequence] = set()  # but the first of each request: others may come to run before them
        self.count = 0

    def begin_any(self, draw: random.Random) -> None:
        self.begin(
            policy=draw.choice(POLICIES), tables=draw.choice(LAYOUTS), pages=draw.randint(10, 16),
            prefix=draw.random() < 0.5, saves=draw.random() < 0.5, host=draw.choice([0, 6, 20]),
            ttl=draw.choice([None, 5.0]), seed=draw.randrange(10**6),
        )  # fmt: skip

    def submit(self, shared: int, own: int, most: int, samples: int, beams: bool, salt: str, which: int) -> None:
        """Prompts have beginnings in common: zeros, or ones, often whole pages of them and one token more. Of one
        request come samples, or the beams of a search."""
        ids = (which,) * shared + tuple(self.draw.randrange(3) for _ in range(own + (shared == 0)))
        if not self.limits.chunked_prefill and self.draw.random() < 0.8:
            ids = ids[-BUDGET:]  # often exactly what a step may compute
        self.ask(ids, most, samples, salt, beams)

    def ask(self, ids: tuple[int, ...], most: int, samples: int, salt: str, beams: bool = False) -> None:
        asked = SamplingParameters(max_tokens=most)
        theirs = {"cache_salt": salt, "priority": self.draw.randrange(3), "tenant": self.draw.choice("ab")}
        new = [
            Sequence.from_request(Request(f"r{self.count + i}", ids, asked, **theirs), self.count + i)
            for i in range(samples)
        ]
        for each in new:
            each.arrival_time = self.now
        self.count += samples
        tokens = min(len(ids) + most, CONTEXT) - 1
        count = samples if beams else 1
        needed = self.manager.peak_pages(tokens, len(ids), count)
        fits = all(n <= pool.num_pages for n, pool in zip(needed, self.manager.pools, strict=True)) and count <= 4
        fits = fits and not (beams and self.manager.budget is not None)
        fits = fits and (self.limits.chunked_prefill or len(ids) <= BUDGET)
        try:
            self.scheduler.submit(new[0], new[1:], as_beams=beams)
            assert fits and len(ids) < CONTEXT
            self.open += new
            self.samples.update([] if beams else new[1:])
        except RequestRefused:
            assert not fits or len(ids) >= CONTEXT

    def step(self, steps: int) -> None:
        for _ in range(steps):
            if not self.one_step():
                return

    def one_step(self) -> bool:
        try:
            plan = self.scheduler.plan(self.drafts(), self.now)
        except WorkbenchError as error:
            assert self.policy == "wild" and str(error).startswith("policy wild: raised RuntimeError: midway")
            self.now += 0.25
            return True
        if plan is None:
            assert not self.open, "something waits and nothing is planned"
            return False
        self.memory.move(plan)
        for sequence, words in plan.errors:
            assert self.policy == "wild" and words.startswith("policy wild: gives")
            if sequence.finish_reason is None:
                self.end(sequence, FinishReason.ERROR)  # its beams too
        if not plan.spans:
            return True
        self.look_over(plan)
        self.memory.compute(plan)
        if self.draw.random() < 0.03:  # interrupted: as if it had not begun
            self.memory.forget_step(plan)
            self.memory.forget_free()
            return True
        sampled = [span.sequence for span in plan.spans if span.needs_sample]
        if self.draw.random() < 0.05:  # a listener cancels what the step has just computed
            self.end(self.draw.choice(plan.spans).sequence, FinishReason.CANCELLED)
        tokens = {s.request_id: self.draw.randrange(2) for s in sampled if not s.beams}
        drafted = {span.sequence.request_id: span.draft_token_ids for span in plan.spans}
        self.scheduler.commit(plan, tokens, {k: ids[: self.draw.randint(0, len(ids))] for k, ids in drafted.items()})
        for beams in {id(s.beams): s.beams for s in sampled if s.beams}.values():
            if all(beam.num_new_tokens == 0 and beam.finish_reason is None for beam in beams):
                self.branch(beams)
        for span in plan.spans:
            s = span.sequence
            if s.finish_reason is not None:
                assert not any(s.pages), "what has ended holds pages again"
            elif len(s.output_ids) >= s.request.sampling.max_tokens or len(s.token_ids) >= CONTEXT:
                self.end(s, FinishReason.LENGTH)
        self.memory.forget_free()
        self.now += 0.25
        return True

    def drafts(self) -> dict[str, tuple[int, ...]]:
        """Propose tokens for some of those that run, in prefill too; no more than their texts have room for."""
        proposed = {}
        for s in self.scheduler.running:
            room = min(CONTEXT - len(s.token_ids), s.request.sampling.max_tokens - len(s.output_ids)) - 1
            if self.speculates and room > 0 and self.draw.random() < 0.5:
                proposed[s.request_id] = tuple(
                    self.draw.randrange(2) for _ in range(self.draw.randint(1, min(MAX_DRAFTS, room)))
                )
        return proposed

    def branch(self, beams: list[Sequence]) -> None:
        """Any of them may go on, with one token or with several, and none of them must."""
        going = [(self.draw.choice(beams), self.draw.randrange(3)) for _ in beams]
        texts = [[*parent.token_ids, token] for parent, token in going]
        children = self.scheduler.sequence_groups.advance_beams(beams, going)
        assert [child.token_ids for child in children] == texts and {id(s) for s in children} == {id(s) for s in beams}

    def look_over(self, plan: StepPlan) -> None:
        assert 0 < plan.num_tokens <= BUDGET
        assert len(plan.spans) <= len(self.scheduler.running) <= self.limits.max_num_seqs
        lengths = [span.length for span in plan.spans]
        assert lengths == sorted(lengths, key=lambda length: length > 1), "decodes are packed first"
        for span in plan.spans:
            assert span.start == span.sequence.num_computed_tokens
            assert span.needs_sample == (span.num_known_tokens == len(span.sequence.token_ids))
            assert span.start < len(span.sequence.token_ids), "the last token is always computed"
            if not (self.limits.chunked_prefill or span.sequence.children or span.sequence.beams):
                whole = len(span.sequence.token_ids) - span.start
                assert span.needs_sample or whole > BUDGET, "a prompt that fits into a step is cut"
            if span.draft_token_ids:
                assert span.num_known_tokens == len(span.sequence.token_ids), "drafts follow the last token"
                assert not span.sequence.beams, "beams verify no drafts"
            for t, table in enumerate(self.manager.groups):
                held = sum(page != 0 for page in span.sequence.pages[t])
                drafts = MAX_DRAFTS * self.speculates  # of this step, or of one that was interrupted
                known, ahead = len(span.sequence.token_ids) + drafts, self.limits.max_chunk_tokens + drafts
                assert held <= table.max_pages(known, ahead, SIZE)
        limits = self.limits
        if self.policy != "continuous fcfs" or limits.max_chunk_tokens < BUDGET or not limits.chunked_prefill:
            return
        oldest = min((s for s in self.open if s.parent is None), key=lambda s: s.arrival_index)
        ours = oldest.beams or [oldest]
        if oldest in self.samples and oldest not in self.scheduler.running:
            return
        assert any(s.sequence in ours for s in plan.spans) or plan.decode_tokens == BUDGET or plan.num_tokens == BUDGET

    def end(self, ended: Sequence, reason: FinishReason) -> None:
        for each in reversed(ended.beams or [ended]):
            if reason is FinishReason.ERROR:
                self.memory.spoil(each)
            self.scheduler.finish(each, reason)
            assert each.finish_reason is reason
            self.open.remove(each)
        self.memory.forget_free()

    def stop(self, which: int, reason: FinishReason) -> None:
        """End one of those that are open, if there is any."""
        if not self.open:
            return
        ended = self.open[which % len(self.open)]
        self.end(ended, reason)
        if reason is FinishReason.ERROR:  # its client tries again
            self.ask(tuple(ended.token_ids), 1, 1, ended.request.cache_salt)

    def evict(self, table: int, count: int, everything: bool) -> None:
        if self.manager.prefix_cache is None:
            return
        if everything:
            self.manager.prefix_cache.clear()
        else:
            moves = self.draw.choice([None, self.manager.transfers])
            self.manager.prefix_cache.evict(table % len(self.manager.groups), count, moves)
        self.memory.forget_free()

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def check(self) -> None:
        """Pages are accounted for, and the queues are in order."""
        self.memory.check(self.open)
        for queue in (self.scheduler.running, self.scheduler.waiting):
            orders = [s.arrival_index for s in queue]
            assert orders == sorted(orders)

    def finish(self) -> None:
        """However scarce the pages: everything ends, and nothing is left but what the index keeps."""
        if self.policy == "wild":  # under which nothing needs to end
            self.scheduler.policy = FCFS()
        for _ in range(3_000):
            if not self.one_step():
                break
        assert not self.open and self.scheduler.pages_in_use == 0
        self.manager.transfers_done()
        self.memory.check([])
        if self.manager.prefix_cache is not None:
            self.manager.prefix_cache.clear()
            self.memory.check([])
            assert all(pool.num_free == pool.num_pages for pool in self.manager.pools)
