"""Executors around a runner's own: one that records logits by text, and one that changes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from workbench.engine.runner import Runner, generate
from workbench.request import Request
from workbench.scheduler.plan import StepPlan

Rows = dict[tuple[int, ...], Tensor]


class Around:
    """Stands in for a runner's executor, and is it where it says nothing of its own."""

    gathers_logits = False  # all of them are looked at

    def __init__(self, runner: Runner):
        self.inner: Any = runner.core.executor
        runner.core.executor = self  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def forward(self, plan: StepPlan) -> Tensor:
        return self.inner.forward(plan)


class Recorded(Around):
    """A runner's executor, and the logits that it gave after each text."""

    def __init__(self, runner: Runner):
        super().__init__(runner)
        self.rows: Rows = {}

    def forward(self, plan: StepPlan) -> Tensor:
        logits = self.inner.forward(plan)
        sampled = [span for span in plan.spans if span.needs_sample]
        for span, row in zip(sampled, logits, strict=True):
            self.rows[tuple(span.sequence.token_ids[: span.end])] = row.clone()
        return logits


class Changed(Around):
    """A runner's executor whose logits a function of (plan, logits) changes, or looks at."""

    def __init__(self, runner: Runner, change: Callable[[StepPlan, Tensor], Tensor]):
        super().__init__(runner)
        self.change = change

    def forward(self, plan: StepPlan) -> Tensor:
        return self.change(plan, self.inner.forward(plan))


def rows_of(runner: Runner, requests: Iterable[Request]) -> Rows:
    """Return the logits after each text that was sampled from."""
    recorded = Recorded(runner)
    ends = generate(runner, requests)
    assert all(end.reason == "length" for end in ends.values()), {end.error for end in ends.values()}
    return recorded.rows
