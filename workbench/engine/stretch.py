"""Take several equal decode steps at once while the scheduler has nothing to decide. Integers only."""

from __future__ import annotations

from dataclasses import replace

from workbench.engine.plan import Span, StepPlan
from workbench.engine.scheduler import Scheduler


def alike(scheduler: Scheduler, plan: StepPlan) -> int:
    """Return the number of steps from `plan` on that are planned alike if no request arrives or finishes; at least 1.

    All running sequences decode, and none needs, fills or frees a page before the last of these steps. Waiting requests
    have no slot, and the policy is steady (see `SchedulingPolicy`).
    """
    if not plan.decode_only or plan.moves or len(plan.spans) != len(scheduler.running):
        return 1
    if not getattr(scheduler.policy, "steady", False) or scheduler.holdings.budget is not None:
        return 1
    if scheduler.waiting and (plan.decisions or len(scheduler.running) < scheduler.limits.max_num_seqs):
        return 1
    steps = scheduler.context
    for span in plan.spans:
        sequence = span.sequence
        known = len(sequence.token_ids)
        if sequence.followers or not span.samples or not span.decodes:
            return 1
        steps = min(steps, sequence.due - sequence.computed, sequence.covered - known + 1)
    return max(1, steps)


def ahead(scheduler: Scheduler, plan: StepPlan, steps: int, token: int) -> StepPlan:
    """Return the plan of the last of `steps` equal steps, with the earlier ones applied: each sampled `token_id`."""
    if steps == 1:
        return plan
    more = steps - 1
    scheduler.skip(more)
    spans = []
    for span in plan.spans:
        sequence = span.sequence
        sequence.token_ids.extend([token] * more)
        sequence.computed += more
        sequence.computed_tokens += more
        spans.append(Span(sequence, span.start + more, 1, True))
    return replace(plan, spans=tuple(spans))
