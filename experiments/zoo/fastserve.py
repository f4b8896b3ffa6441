"""FastServe: a queue of several levels, in which a request sinks as it is served and skips the levels of its prompt.

Wu et al., 2023, "Fast Distributed Inference Serving for Large Language Models": lengths are not known, so a request
moves one level down each time it has used the quantum of its level, and those of upper levels go first. It joins at the
level whose quantum its first step, the prompt, would use (skip-join). With quanta q, 2q, 4q, ... that is, for a request
whose prompt and output are n tokens so far,

    level  =  ceil(log2(n / q))  >=  0

The last in order is preempted for one of an upper level, one a step, as long as that may still be brought back
(`max_preemptions`). The paper promotes what has waited long; here one in four admissions goes to a request that has
waited for `starvation_limit` steps, which then is not preempted.
"""

from __future__ import annotations

from dataclasses import dataclass

from workbench.parts import RequestView, SchedulerDecision, SchedulerState, with_aging


@dataclass(frozen=True)
class SkipJoin:
    """Sort by level, then by arrival."""

    quantum: int = 512  # tokens of the first level
    max_preemptions: int = 2
    starvation_limit: int = 200

    def level(self, entry: RequestView) -> int:
        return max(0, (-(-entry.num_tokens // self.quantum) - 1).bit_length())

    def rank(self, entry: RequestView) -> tuple[int, int]:
        return self.level(entry), entry.arrival_index

    def __call__(self, state: SchedulerState) -> SchedulerDecision:
        waiting = sorted(state.waiting, key=self.rank)
        turns = with_aging(state, self.starvation_limit, iter(waiting))
        return SchedulerDecision(
            [state.decodes, sorted(state.prefills, key=self.rank), turns],
            preempted=self.preempted(state, waiting[0]) if waiting else (),
        )

    def preempted(self, state: SchedulerState, entry: RequestView) -> list[RequestView]:
        """Return the last running request in order, if it is to make room for `entry`."""
        old = state.step - self.starvation_limit
        last = max(
            (each for each in state.running if each.num_preemptions < self.max_preemptions and each.arrival_step > old),
            key=self.rank,
            default=None,
        )
        if last is None or self.level(last) <= self.level(entry) or state.free_slots >= entry.slots_needed:
            return []
        return [last] if state.fits(entry, preempted=[last]) else []
