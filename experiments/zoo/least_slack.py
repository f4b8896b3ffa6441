"""Least slack first: the request that could wait the least before its remaining work no longer fits goes first.

Mok, 1983, "Fundamental Design Problems of Distributed Systems for the Hard-Real-Time Environment": the slack of a job
with deadline d and remaining work c at time t is what is left when it runs from now on, and the least is served first:

    s(t)  =  d - t - c,    c  =  (tokens to compute) * prefill_seconds + (tokens to decode) * decode_seconds

t is the same for all, so they are sorted by d - c, which does not change while a request waits. Tokens to decode are
those that a predictor expects, less those it has. As with any order of service in a batch, a running request is not
interrupted. A request without a deadline counts as one with `default` seconds, so that none starves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from workbench.parts import RequestView, SchedulerDecision, SchedulerState, sorted_with_aging

NEVER = 2**62  # steps: the order itself lets none starve


@dataclass(frozen=True)
class LeastSlack:
    """Sort by deadline less remaining work, in seconds."""

    prefill_seconds: float = 0.0001  # of a prompt's token
    decode_seconds: float = 0.02  # of an output token
    default: float = 30.0  # seconds

    steady = True  # a decoding request is never held back

    def key(self, entry: RequestView) -> float:
        deadline = entry.arrival_time + self.default if math.isinf(entry.deadline) else entry.deadline
        generated = entry.num_tokens - entry.num_prompt_tokens
        decodes = max(0, entry.predicted_tokens - generated)
        return deadline - entry.num_new_tokens * self.prefill_seconds - decodes * self.decode_seconds

    def __call__(self, state: SchedulerState) -> SchedulerDecision:
        turns = sorted_with_aging(state, NEVER, self.key)
        return SchedulerDecision([state.decodes, turns], keep=sorted(state.running, key=self.key))
