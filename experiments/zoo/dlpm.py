"""Deficit longest prefix match: fair between tenants up to a quantum, and within it the longest cached prefix first.

Cao et al., 2025, "Locality-aware Fair Scheduling in LLM Serving". Each tenant i has a deficit counter q_i that serving
lowers and a refill of Q raises; only tenants with q_i > 0 are served, the longest cached prefix first. A counter of
served tokens c_i says the same without a state of its own: with m the least of those that wait, tenant i has

    q_i > 0    <=>    c_i - m  <  Q

so that `quantum` Q goes from the virtual token counter (0: fairness alone) to the longest prefix (no bound). One in
four admissions goes to a request that has waited for `starvation_limit` steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from workbench.parts import RequestView, SchedulerDecision, SchedulerState, with_aging


@dataclass(frozen=True)
class DeficitLongestPrefix:
    """Sort the oldest `window` waiting requests by whether their tenant is in deficit, then by cached tokens."""

    quantum: int = 20_000  # tokens
    window: int = 128
    starvation_limit: int = 200

    steady = True  # a decoding request is never held back

    def __call__(self, state: SchedulerState) -> SchedulerDecision:
        served, waiting = state.served_tokens, state.waiting
        least = min((served[tenant] for tenant in state.waiting_by_tenant()), default=0)

        def key(entry: RequestView) -> tuple[int, int]:
            rounds = (served[entry.tenant] - least) // max(1, self.quantum)
            return rounds, -state.cached_tokens[entry.request_id]

        order = chain(sorted(waiting[: self.window], key=key), waiting[self.window :])
        turns = with_aging(state, self.starvation_limit, order)
        return SchedulerDecision([state.decodes, state.prefills, turns])
