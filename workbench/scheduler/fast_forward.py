"""Skip equal decode steps while the scheduler has nothing to decide."""

from __future__ import annotations

from dataclasses import replace

from workbench.scheduler.plan import Span, StepPlan
from workbench.scheduler.scheduler import Scheduler


def steps_until_change(scheduler: Scheduler, plan: StepPlan) -> int:
    """Return how many steps, from `plan` on, have the same plan if no request arrives or finishes; at least 1.

    In these steps all running sequences decode, none needs, fills or frees a page before the last step, and the policy
    has no decision to make (`Scheduler.lets_all_decode`).
    """
    if not plan.decode_only or plan.transfers or len(plan.spans) != len(scheduler.running):
        return 1
    if not scheduler.lets_all_decode or scheduler.kv_cache_manager.budget is not None:
        return 1
    if scheduler.waiting and plan.decisions:
        return 1
    steps = scheduler.max_model_len
    for span in plan.spans:
        sequence = span.sequence
        if sequence.children or not span.needs_sample or not span.is_decode:
            return 1
        until_boundary = sequence.next_page_boundary - sequence.num_computed_tokens
        steps = min(steps, until_boundary, sequence.allocated_until - len(sequence.token_ids) + 1)
    return max(1, steps)


def fast_forward(scheduler: Scheduler, plan: StepPlan, steps: int, token_id: int) -> StepPlan:
    """Apply `steps` - 1 equal steps that each sampled `token_id`, and return the plan of the last step."""
    if steps == 1:
        return plan
    more = steps - 1
    scheduler.skip_steps(more)
    spans = []
    for span in plan.spans:
        sequence = span.sequence
        sequence.token_ids.extend([token_id] * more)
        sequence.num_computed_tokens += more
        sequence.computed_tokens += more
        spans.append(Span(sequence, span.start + more, 1, True))
    return replace(plan, spans=tuple(spans))
