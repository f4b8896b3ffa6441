"""Compute a failed step in parts, so that only the requests that cause the failure end with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from workbench.engine.plan import StepPlan
from workbench.request import Sequence


def forward_isolated(
    forward: Callable[[StepPlan], Tensor], plan: StepPlan
) -> tuple[StepPlan, Tensor, list[tuple[Sequence, Exception]]]:
    """Compute `plan` by halves until each failure is isolated to one sequence.

    Positions are written again with the same keys and values, and nothing else has changed, since `commit` comes later.
    A failure that does not recur ends no request.

    Returns:
        the plan without sequences that fail even alone (and without their beams), the logits of the others
        [sample, vocab], and the error of each failed sequence.
    """
    failed: list[tuple[Sequence, Exception]] = []
    rows: dict[Sequence, Tensor] = {}
    parts = list(reversed(plan.split_in_half()))
    while parts:
        part = parts.pop()
        if not part.spans:
            continue
        try:
            logits = forward(part).clone()  # what a step gives is valid until the next
        except Exception as error:
            if len(part.spans) == 1:
                failed.append((part.spans[0].sequence, error))
            else:
                parts += reversed(part.split_in_half())
            continue
        counts = [span.num_logits for span in part.spans]
        rows |= zip((span.sequence for span in part.spans), logits.split(counts), strict=True)
    ended = {mate for sequence, _ in failed for mate in (sequence, *sequence.beams)}
    kept = tuple(span for span in plan.spans if span.sequence not in ended)
    logits = torch.cat([rows[span.sequence] for span in kept]) if kept else torch.empty(0, 0)
    return replace(plan, spans=kept), logits, failed


def select_logits(plan: StepPlan, remaining: StepPlan, logits: Tensor) -> Tensor:
    """Select from the `logits` [sample, vocab] of `plan` those of the spans of `remaining`."""
    mine = {span.sequence for span in remaining.spans}
    parts = logits.split([span.num_logits for span in plan.spans])
    rows = [part for span, part in zip(plan.spans, parts, strict=True) if span.sequence in mine]
    return torch.cat(rows) if rows else logits[:0]
