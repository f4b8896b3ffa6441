"""TRAIL: shortest predicted remaining work first, and only young requests are preempted for it.

Shahout et al., 2024, "Don't Stop Me Now: Embedding Based Scheduling for LLMs". A request of predicted length r that has
a output tokens has rank r - a, the least is served first, and its pages may be taken from it only while

    a  <  c * r        (c = 0: never, shortest job first; c = 1: shortest remaining time first)

for what a preempted request has computed is lost. The paper predicts anew from a layer's embedding at every token; here
the prediction comes with the request, once. One preemption a step.

It gives up the law that no request starves: a long one does while shorter ones keep coming.
"""

from __future__ import annotations

from dataclasses import dataclass

from workbench.parts import RequestView, SchedulerDecision, SchedulerState

# Rivals of the kit with shorter outputs.
STARVED = ("short prompts", "long prompts", "prompts without outputs", "requests predicted to be short")


@dataclass(frozen=True)
class LimitedPreemption:
    """Sort by predicted remaining tokens; preempt a request while it has less than `share` of its prediction."""

    share: float = 0.8

    gives_up = frozenset(f"no request starves among {rivals}" for rivals in STARVED)

    def rank(self, entry: RequestView) -> tuple[int, int]:
        return entry.predicted_tokens - (entry.num_tokens - entry.num_prompt_tokens), entry.arrival_index

    def __call__(self, state: SchedulerState) -> SchedulerDecision:
        waiting = sorted(state.waiting, key=self.rank)
        return SchedulerDecision(
            [state.decodes, sorted(state.prefills, key=self.rank), waiting],
            keep=sorted(state.running, key=self.rank),
            preempted=self.preempted(state, waiting[0]) if waiting else (),
        )

    def preempted(self, state: SchedulerState, entry: RequestView) -> list[RequestView]:
        """Return the last running request in order, if it is to make room for `entry`."""
        young = [each for each in state.running if self.may_lose_its_pages(each)]
        last = max(young, key=self.rank, default=None)
        if last is None or self.rank(last) <= self.rank(entry) or state.free_slots >= entry.slots_needed:
            return []
        return [last] if state.fits(entry, preempted=[last]) else []

    def may_lose_its_pages(self, entry: RequestView) -> bool:
        return entry.num_tokens - entry.num_prompt_tokens < self.share * entry.predicted_tokens
