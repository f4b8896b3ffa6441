"""Longest cached prefix first: the request of whose prompt most is in the prefix cache goes first.

Zheng et al., 2024, "SGLang: Efficient Execution of Structured Language Model Programs", section 3 and theorem 3.1: for
a batch of requests that are all there, visiting the radix tree depth first computes each of its edges once,

    computed tokens  =  sum over edges e of the radix tree of |e|     (the least there can be)

and, as long as the cache holds the longest request, serving the longest cached prefix first is such a visit.

Looking a prompt up costs time, so only the `window` oldest that wait are sorted, as in SGLang, which gives up sorting
above 128. One in four admissions goes to a request that has waited for `starvation_limit` steps; without that, requests
without a cached prefix would starve.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from workbench.parts import SchedulerDecision, SchedulerState, with_aging


@dataclass(frozen=True)
class LongestPrefix:
    """Sort the oldest `window` waiting requests by their cached tokens."""

    window: int = 128
    starvation_limit: int = 200

    steady = True  # a decoding request is never held back

    def __call__(self, state: SchedulerState) -> SchedulerDecision:
        oldest = sorted(state.waiting[: self.window], key=lambda entry: -state.cached_tokens[entry.request_id])
        turns = with_aging(state, self.starvation_limit, chain(oldest, state.waiting[self.window :]))
        return SchedulerDecision([state.decodes, state.prefills, turns])
