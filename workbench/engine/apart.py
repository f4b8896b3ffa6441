"""A step that failed, computed in parts, so that only who makes it fail ends with it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from workbench.engine.plan import StepPlan
from workbench.request import Sequence


def forward_apart(
    forward: Callable[[StepPlan], Tensor], plan: StepPlan
) -> tuple[StepPlan, Tensor | None, list[tuple[Sequence, Exception]]]:
    """`plan` without those whose tokens cannot be computed even alone, the logits of the others, and why those cannot.

    What fails is halved until one sequence is left. Positions are written again with the same keys and values, and
    nothing else has changed: `commit` comes later. A failure that does not come back ends nobody.
    """
    left, right = plan.halves()
    rows: list[Tensor] = []
    broken: list[tuple[Sequence, Exception]] = []
    waiting = [right, left] if right.spans else [left]
    while waiting:
        part = waiting.pop()
        try:
            rows.append(forward(part).clone())  # what a step gives is valid until the next
        except Exception as error:
            if len(part.spans) == 1:
                broken.append((part.spans[0].sequence, error))
            else:
                waiting += reversed(part.halves())
    ended = [sequence for sequence, _ in broken]
    return plan.without(ended), torch.cat(rows) if rows else None, broken
