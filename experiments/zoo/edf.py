"""Earliest deadline first: whatever is to be done soonest goes first, in the queue and for the pages.

Horn, 1974, "Some simple scheduling algorithms" (after Jackson, 1955; Liu and Layland, 1973, for periodic jobs):
with one machine and work that may be interrupted, if any order meets all deadlines d_i, then so does this one:

    next  =  argmin over i of d_i

A batch serves many at once, so here the earliest deadlines get the slots, the prefill tokens and, when pages run out,
the pages; a running request is not interrupted for another. A request without a deadline counts as one with `default`
seconds: then every deadline comes closer than those of later arrivals, and none starves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from workbench.parts import RequestView, SchedulerDecision, SchedulerState, sorted_with_aging

NEVER = 2**62  # steps: the order itself lets none starve


@dataclass(frozen=True)
class EarliestDeadline:
    """Sort by deadline; `default` seconds after its arrival for a request that has none."""

    default: float = 30.0

    steady = True  # a decoding request is never held back

    def key(self, entry: RequestView) -> float:
        return entry.arrival_time + self.default if math.isinf(entry.deadline) else entry.deadline

    def __call__(self, state: SchedulerState) -> SchedulerDecision:
        turns = sorted_with_aging(state, NEVER, self.key)
        return SchedulerDecision([state.decodes, turns], keep=sorted(state.running, key=self.key))
