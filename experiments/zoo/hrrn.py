"""Highest response ratio next: short work goes first, and waiting makes any work look short.

Brinch Hansen, 1971, "Short-Term Scheduling in Multiprogramming Systems": of the requests that wait, next is the one
with the highest

    R  =  (w + s) / s,    w: seconds waited,   s: service time  =  prompt * prefill_seconds + predicted * decode_seconds

Every request's ratio rises without bound, so none starves and nothing needs to be set, and it rises faster the shorter
the work is, so it is close to shortest job first.
"""

from __future__ import annotations

from dataclasses import dataclass

from workbench.parts import RequestView, SchedulerDecision, SchedulerState


@dataclass(frozen=True)
class HighestResponseRatio:
    """Sort by response ratio, the highest first."""

    prefill_seconds: float = 0.0001  # of a prompt's token
    decode_seconds: float = 0.02  # of an output token

    steady = True  # a decoding request is never held back

    def ratio(self, entry: RequestView, now: float) -> float:
        service = entry.num_prompt_tokens * self.prefill_seconds + entry.predicted_tokens * self.decode_seconds
        return (now - entry.arrival_time + service) / service

    def __call__(self, state: SchedulerState) -> SchedulerDecision:
        waiting = sorted(state.waiting, key=lambda entry: -self.ratio(entry, state.now))
        return SchedulerDecision([state.decodes, state.prefills, waiting])
