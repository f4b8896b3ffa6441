"""Switch the KV cache off: every step that samples a token recomputes the whole text before it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.executors.programs.program import StepProgram
from workbench.executors.step_runner import Forward, StepRunner
from workbench.oracle import naive
from workbench.scheduler.plan import Span, StepPlan


def disable_cache(runner: Runner, oracle: bool = False) -> None:
    """Make `runner` recompute its texts in every step: in a batch by its prefill program, or with `oracle` one by one
    by oracle/naive.py.

    Raises:
        WorkbenchError: if pages may be freed before a text ends.
    """
    if any(table.is_recurrent for table in runner.store.groups) and not oracle:
        raise WorkbenchError("executor: uncached needs all pages: a recurrent state takes the place of earlier ones")
    keeps_pages = runner.kv_cache.evictor is None and all(table.sliding_window is None for table in runner.store.groups)
    if not (keeps_pages or oracle):
        raise WorkbenchError("executor: uncached needs all pages: take out cache.evict and attention.sliding_window")
    executor = runner.core.executor
    if oracle:
        executor.observer = None
        executor.programs.clear()
        executor.programs[NaiveProgram.kind] = NaiveProgram(runner.model, runner.store)
    executor.hooks.append(whole_texts)


def executor_settings(executor: StepRunner) -> dict[str, Any]:
    """Return the `executor` settings of an experiment that describe a runner's step runner."""
    if whole_texts not in executor.hooks:
        return {"kind": "real"}
    return {"kind": "uncached", "oracle": NaiveProgram.kind in executor.programs}


def whole_texts(forward: Forward, plan: StepPlan) -> Tensor:
    """Compute a plan with its spans extended to the start of their texts; pages are written again with the same
    contents.
    """
    return forward(replace(plan, spans=tuple(_whole(span) for span in plan.spans if span.num_logits)))


class NaiveProgram(StepProgram):
    """A program that computes each text by itself: no pages, no batch, no backend."""

    kind = "oracle"
    chosen: Mapping[int, Tensor] = MappingProxyType({})  # not counted

    def pack(self, plan: StepPlan) -> list[tuple[Tensor, int]]:
        """Return, for each text, its token ids and the number of its last rows that are sampled."""
        return [(torch.tensor(span.token_ids), span.num_logits) for span in plan.spans]

    def __call__(self, batch: list[tuple[Tensor, int]], layers: tuple[int, ...] = ()) -> Tensor:
        return torch.cat([naive.logits(self.model, ids)[-rows:] for ids, rows in batch]).float()


def _whole(span: Span) -> Span:
    return span._replace(start=0, length=span.end)
