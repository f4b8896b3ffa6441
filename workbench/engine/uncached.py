"""Switch the KV cache off: every step that wants a token recomputes the whole text before it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.oracle import naive
from workbench.scheduler.plan import Span, StepPlan


def disable_cache(runner: Runner, oracle: bool = False) -> None:
    """Make `runner` recompute its texts in every step: by its prefill executor, or one by one with oracle/naive.py.

    Raises:
        WorkbenchError: if pages may be freed before a text ends.
    """
    if any(table.is_recurrent for table in runner.store.groups) and not oracle:
        raise WorkbenchError("executor: uncached needs all pages: a recurrent state takes the place of earlier ones")
    keeps_pages = runner.kv_cache.evictor is None and all(table.sliding_window is None for table in runner.store.groups)
    if not (keeps_pages or oracle):
        raise WorkbenchError("executor: uncached needs all pages: take out cache.evict and attention.sliding_window")
    runner.core.executor = NaiveExecutor(runner) if oracle else RecomputingExecutor(runner)


class RecomputingExecutor:
    """Start spans where their texts do; pages are written again with the same contents."""

    def __init__(self, runner: Runner):
        self.inner = runner.core.executor
        self._nothing = torch.empty(0, runner.model.spec.vocab_size)

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
        spans = tuple(_whole(span) for span in plan.spans if span.num_logits)
        return self.inner.forward(replace(plan, spans=spans)) if spans else self._nothing


class NaiveExecutor:
    """Compute each text by itself: no pages, no batch, no backend."""

    compiles = 0
    kernel_seconds: float | None = None
    artifacts: Mapping[str, str] = MappingProxyType({})

    def __init__(self, runner: Runner):
        self.model = runner.model
        self._nothing = torch.empty(0, runner.model.spec.vocab_size)

    def forward(self, plan: StepPlan) -> Tensor:
        texts = [(_whole(span).token_ids, span.num_logits) for span in plan.spans if span.num_logits]
        logits = [naive.logits(self.model, torch.tensor(ids))[-rows:] for ids, rows in texts]
        return torch.cat(logits).float() if logits else self._nothing


def _whole(span: Span) -> Span:
    return span._replace(start=0, length=span.end)
