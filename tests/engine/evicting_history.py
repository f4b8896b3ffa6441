"""A history under eviction: kept tokens are where they should be after preemption, cancelling and swapping in."""

from __future__ import annotations

import random

from tests.engine.history import BUDGET, CONTEXT, FULL, SIZE, Counted, History
from tests.engine.memory import Memory, Name
from workbench.kv_cache.budget import EvictionBudget
from workbench.kv_cache.pages import KVCacheGroup, PagePool
from workbench.request import Sequence
from workbench.scheduler.limits import SchedulerLimits
from workbench.scheduler.plan import StepPlan
from workbench.scheduler.scheduler import Scheduler


class EvictingMemory(Memory):
    """Each table keeps other tokens, chosen at random; `stays` is what a query of a sequence must find, in order."""

    def __init__(self, scheduler: Scheduler, draw: random.Random):
        super().__init__(scheduler)
        self.stays: dict[tuple[int, Sequence], list[Name]] = {}
        self.draw, self.evictions = draw, 0

    def move(self, plan: StepPlan) -> None:
        for sequence, held, kept, pages in plan.transfers.evictions:
            for t, mine in enumerate(pages):
                names = self.stays[t, sequence]
                assert len(names) == held and self._standing(t, mine, held) == names, "it was moved already"
                chosen = sorted(self.draw.sample(range(held - 1), kept - 1)) + [held - 1]
                self.stays[t, sequence] = [names[slot] for slot in chosen]
                for page in mine:
                    self.pages[t][page] = {}
                for slot, name in enumerate(self.stays[t, sequence]):
                    self.pages[t][mine[slot // self.size]][slot % self.size] = name
            self.evictions += 1
        super().move(plan)

    def forget_step(self, plan: StepPlan) -> None:
        for span in plan.spans:
            for t in range(len(self.manager.groups)):
                del self.stays[t, span.sequence][span.start - span.sequence.num_evicted_tokens :]

    def _standing(self, t: int, pages: list[int], held: int) -> list[Name | None]:
        return [self.pages[t].get(pages[slot // self.size], {}).get(slot % self.size) for slot in range(held)]

    def _write(self, sequence: Sequence, start: int, end: int) -> None:
        for t in range(len(self.manager.groups)):
            names = [] if start == 0 else self.stays[t, sequence]
            assert len(names) == start - sequence.num_evicted_tokens
            for position in range(start, end):
                slot = position - sequence.num_evicted_tokens
                page = sequence.pages[t][slot // self.size]
                assert self.manager.pools[t].ref_count(page) == 1, "a shared page is written to"
                self.pages[t].setdefault(page, {})[slot % self.size] = self._name(sequence, position)
                names.append(self._name(sequence, position))
            self.stays[t, sequence] = names

    def _read(self, sequence: Sequence, start: int, end: int) -> None:
        for t, mine in enumerate(sequence.pages):
            names = self.stays[t, sequence]
            assert self._standing(t, mine, len(names)) == names, "a query finds something else than what stays"


class EvictingHistory(History):
    """As many tokens as the budget says, with or without a host."""

    def begin_any(self, draw: random.Random) -> None:
        tables, pages = draw.choice([(FULL,), (FULL, KVCacheGroup((1,)))]), draw.randint(4, 6)
        host = draw.choice([20, 0])
        self.begin("continuous fcfs", tables, pages, False, False, host, None, draw.randrange(10**6))
        budget = EvictionBudget(
            draw.choice([14, 9, 5, 2, 12]), None, draw.choice([None, 1, 3]), draw.choice([True, False])
        )
        self.speculates, self.limits = False, SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=BUDGET)
        cpu_pools = tuple(PagePool(host, SIZE) for _ in tables) if host else ()
        self.manager = Counted(self.manager.pools, tables, BUDGET, None, cpu_pools, budget)
        self.scheduler = Scheduler(self.manager, self.limits, CONTEXT)
        self.memory = EvictingMemory(self.scheduler, self.draw)

    def look_over(self, plan: StepPlan) -> None:
        super().look_over(plan)
        budget = self.manager.budget
        assert budget is not None
        for span in plan.spans:
            sequence, held = span.sequence, span.end - span.sequence.num_evicted_tokens
            prompt, most = sequence.prompt_length, budget.max_tokens(sequence.prompt_length)
            if budget.in_decode:
                assert held <= most and sequence.num_stored_tokens < most
            elif span.end > prompt:
                assert sequence.num_computed_tokens >= prompt and held == min(prompt, most) + span.end - prompt
