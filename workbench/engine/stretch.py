"""Steps in a row in which the scheduler has nothing to decide, so that they can be taken in one move. Integers only."""

from __future__ import annotations

from dataclasses import replace

from workbench.engine.plan import Span, StepPlan
from workbench.engine.scheduler import Scheduler


def alike(scheduler: Scheduler, plan: StepPlan) -> int:
    """How many steps from `plan` on are planned as it is, unless somebody comes or ends: at least 1.

    All that run decode and none lacks a page, fills one or leaves one behind before the last of these steps is over;
    who waits, if anybody, has no place, and the policy promises (see `Policy`) that it has no more to say then.
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
    """The last of `steps` steps that are planned as `plan` is, once those before it are over: each chose `token`."""
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
