"""Virtual token counter: the tenant that was served least goes next.

Sheng et al., 2024, "Fairness in Serving Large Language Models" (OSDI), algorithm 2. A counter of each tenant counts its
tokens, and one that returns is lifted to the least of those that are there:

    c_i  =  w_p * (input tokens of i)  +  w_q * (output tokens of i),    next  =  argmin over waiting i of c_i

While two tenants both have waiting requests their counters never differ by more than twice what one request, or all
that run at once, can add (theorem 4.4: 2 * max(w_p * L_input, w_q * M)).

Here w_p = w_q = 1: the state counts tokens as they are computed. (The paper charges a prompt when it begins, and
weighs outputs twice.) Within a step, each choice charges its prompt, so that one tenant does not take all free slots.

It gives up a law: tenants that were served starve while ever new tenants come, each with a lower counter. The paper
has a fixed number of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from workbench.parts import RequestView, SchedulerDecision, SchedulerState


class VirtualTokenCounter:
    """Serve the oldest waiting request of the tenant with the least counter."""

    steady = True  # a decoding request is never held back
    gives_up = frozenset({"no request starves among requests of other tenants"})

    def __call__(self, state: SchedulerState) -> SchedulerDecision:
        return SchedulerDecision([state.decodes, state.prefills, self.turns(state)])

    def turns(self, state: SchedulerState) -> Iterator[RequestView]:
        queues = state.waiting_by_tenant()
        counters = [(state.served_tokens[name], queue[0].arrival_index, name, 0) for name, queue in queues.items()]
        heapq.heapify(counters)
        while counters:
            counter, _, name, place = heapq.heappop(counters)
            entry, place = queues[name][place], place + 1
            yield entry
            if place < len(queues[name]):
                after = counter + entry.num_new_tokens, queues[name][place].arrival_index, name, place
                heapq.heappush(counters, after)
