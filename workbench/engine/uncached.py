"""Switch the KV cache off: every step that wants a token recomputes the whole text before it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from workbench.engine import naive
from workbench.engine.plan import Span, StepPlan
from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError


def without_cache(runner: Runner, oracle: bool = False) -> None:
    """Make `runner` recompute its texts in every step: by its prefill executor, or one by one with engine/naive.py.

    Raises:
        WorkbenchError: if pages may be freed before a text ends.
    """
    held = runner.cache.evictor is None and all(table.back is None for table in runner.store.tables)
    if not (held or oracle):
        raise WorkbenchError("executor: uncached needs every token's page: take out cache.evict and attention.window")
    runner.executor = _Oracle(runner) if oracle else _Anew(runner)
    if runner.asked:
        runner.asked = MappingProxyType({**runner.asked, "executor": {"kind": "uncached", "oracle": oracle}})


class _Anew:
    """Start spans where their texts do; pages are written again with the same contents."""

    def __init__(self, runner: Runner):
        self.inner = runner.executor
        self._nothing = torch.empty(0, runner.model.spec.vocab)

    @property
    def compiles(self) -> int:
        return self.inner.compiles

    @property
    def kernel_seconds(self) -> float | None:
        return self.inner.kernel_seconds

    @property
    def artifacts(self) -> Mapping[str, str]:
        return self.inner.artifacts

    def forward(self, plan: StepPlan) -> Tensor:
        spans = tuple(_whole(span) for span in plan.spans if span.logit_rows)
        return self.inner.forward(replace(plan, spans=spans)) if spans else self._nothing


class _Oracle:
    """Compute each text by itself: no pages, no batch, no backend."""

    compiles = 0
    kernel_seconds: float | None = None
    artifacts: Mapping[str, str] = MappingProxyType({})

    def __init__(self, runner: Runner):
        self.model = runner.model
        self._nothing = torch.empty(0, runner.model.spec.vocab)

    def forward(self, plan: StepPlan) -> Tensor:
        texts = [(_whole(span).ids, span.logit_rows) for span in plan.spans if span.logit_rows]
        found = [naive.logits(self.model, torch.tensor(ids))[-rows:] for ids, rows in texts]
        return torch.cat(found).float() if found else self._nothing


def _whole(span: Span) -> Span:
    return span._replace(start=0, length=span.end)
