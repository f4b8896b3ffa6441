"""A scheduler under a policy, in integers: steps in which every request samples a token."""

from __future__ import annotations

from workbench.kv_cache.manager import KVCacheManager
from workbench.kv_cache.pages import KVCacheGroup, PagePool
from workbench.kv_cache.prefix import RadixCache
from workbench.request import FinishReason, Request, SamplingParameters, Sequence
from workbench.scheduler.limits import SchedulerLimits
from workbench.scheduler.policies import (
    BatchingMode,
    parse_policy,
)
from workbench.scheduler.policy import SchedulingPolicy
from workbench.scheduler.scheduler import Scheduler


class Line:
    """A scheduler, and steps in which every request samples a token."""

    def __init__(
        self, policy: object, kind: BatchingMode = "continuous", pages: int = 100, prefix: bool = False, **limits
    ):
        made: SchedulingPolicy = parse_policy(policy, kind)
        limited = SchedulerLimits(**{"max_num_seqs": 4, "max_num_batched_tokens": 16, **limits})
        pools, groups = (PagePool(pages, 4),), (KVCacheGroup(),)
        index = RadixCache(pools, groups) if prefix else None
        manager = KVCacheManager(pools, groups, limited.max_num_batched_tokens, index)
        self.scheduler, self.count = Scheduler(manager, limited, 200, made), 0
        self.said: list[str] = []

    def submit(self, prompt: int, most: int = 20, first: int = 0, sampling: dict | None = None, **theirs) -> str:
        ids = tuple(range(first, first + prompt))
        new = Request(f"r{self.count}", ids, SamplingParameters(max_tokens=most, **(sampling or {})), **theirs)
        self.scheduler.submit(Sequence.from_request(new, self.count))
        self.count += 1
        return new.request_id

    def step(self) -> dict[str, int]:
        """Of whom how many tokens were computed."""
        plan = self.scheduler.plan()
        assert plan is not None
        self.said = [f"{decision.request_id} {decision.reason}" for decision in plan.decisions]
        self.scheduler.commit(plan, {span.sequence.request_id: 1 for span in plan.spans if span.needs_sample})
        for span in plan.spans:
            if len(span.sequence.output_ids) >= span.sequence.request.sampling.max_tokens:
                self.scheduler.finish(span.sequence, FinishReason.LENGTH)
        return {span.sequence.request_id: span.length for span in plan.spans}
