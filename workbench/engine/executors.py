"""Execute a step's plan: eager modules, blocks compiled by Inductor, or a compiled step; choose between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal, Protocol

import torch
from torch import Tensor

from compiled_kernels import Lane
from workbench.cache.store import KVStore
from workbench.engine.alike import Watch
from workbench.engine.buckets import bucket_for, check_bucket_for
from workbench.engine.captured import CapturedExecutor
from workbench.engine.compiled import CompiledExecutor, settled
from workbench.engine.contention import StepThreads
from workbench.engine.evicting import EvictingExecutor, Evictor
from workbench.engine.lanes import Lanes
from workbench.engine.mlir_step import MlirStep, step_problem, store_problem
from workbench.engine.observed import observed
from workbench.engine.packing import pack
from workbench.engine.plan import StepPlan
from workbench.engine.prefill import PrefillExecutor, all_in_panels
from workbench.engine.rows import RowsExecutor
from workbench.engine.vetting import Vetted
from workbench.errors import WorkbenchError
from workbench.model.transformer import Transformer

Unit = Literal["block", "step"]
# Tokens of a step that go through the compiled step as rows. A call takes FEW_ROWS[-1] of them, with the weights read
# anew: one call was quicker than blocks in panels in every case measured (0.5 to 0.9 of their time at 64 tokens), a
# second about even (0.9 to 1.1 at 128), from a third on it loses (1.0 to 1.3 at 192). Demo and shape:smollm2-135m,
# float32 and bfloat16, v3, v4 and v4+bf16 alike (experiments/LOG.md, 2026-11-22).
FEW_TOKENS = 128
FEW_TOKENS_BESIDE_OTHERS = 256  # where blocks are not in panels: up to here rows were quicker than Inductor's
FEW_ROWS = (8, 16, 32, 64)


class Executor(Protocol):
    """An executor of plans. `forward` returns logits of each span's last `num_logits` tokens, in order: [sample,
    vocab]."""

    @property
    def compiles(self) -> int: ...

    @property
    def kernel_seconds(self) -> float | None: ...

    @property
    def artifacts(self) -> Mapping[str, str]: ...

    def forward(self, plan: StepPlan) -> Tensor: ...


class EagerExecutor:
    """Run the modules as written."""

    compiles = 0
    kernel_seconds: float | None = None
    artifacts: Mapping[str, str] = MappingProxyType({})

    def __init__(self, model: Transformer, store: KVStore):
        self.model, self.store = model, store

    def forward(self, plan: StepPlan) -> Tensor:
        rows = len(plan.spans) + plan.padding if plan.padding else None
        return settled(self.model(pack(plan, self.store.page_size, self.model.device, rows), self.store))


class MlirExecutor:
    """Run decodes, and steps of few tokens, as one compiled function per bucket; other steps by blocks."""

    def __init__(self, model: Transformer, store: KVStore, rest: Executor, threads: StepThreads | None = None):
        self.model, self.store, self.threads = model, store, threads or StepThreads()
        panels = all_in_panels(model)
        self.rest = PrefillExecutor(model, store, self._rows) if panels else rest
        self.steps: dict[int, MlirStep] = {}
        self.checks: dict[int, MlirStep] = {}  # rows may be of one sequence
        self.few_tokens = FEW_TOKENS if panels else FEW_TOKENS_BESIDE_OTHERS
        self.few: RowsExecutor | None = None
        self.kernel_seconds: float | None = None
        self._made, self._watch = 0, Watch(model)

    @property
    def compiles(self) -> int:
        return self.rest.compiles + self._made + (self.few.compiles if self.few else 0)

    @property
    def artifacts(self) -> Mapping[str, str]:
        ours = {f"decode {rows}": step.artifact for rows, step in self.steps.items()}
        ours |= {f"check {rows}": step.artifact for rows, step in self.checks.items()}
        return {**self.rest.artifacts, **(self.few.artifacts if self.few else {}), **ours}

    def forward(self, plan: StepPlan) -> Tensor:
        self.kernel_seconds = None
        if plan.phase != "decode" and self._watch.changed:
            self.steps, self.checks, self._watch = {}, {}, Watch(self.model)
        together = plan.drafts > 0
        plan = plan.by_rows(self.store.lag)
        if not plan.decode_only:
            return self.rest.forward(plan) if plan.tokens > self.few_tokens else self._as_rows(plan)
        count, steps = len(plan.spans), self.checks if together else self.steps
        rows = check_bucket_for(count) if together else bucket_for(count + plan.padding)
        if rows not in steps:
            steps[rows] = MlirStep(self.model, self.store, rows, together, self.threads)
            self._made += 1
        with torch.inference_mode():
            logits = steps[rows](plan)
            self.kernel_seconds = steps[rows].seconds
            # A slice where every sequence samples, which is nearly always: a selection would copy all logits.
            sampled = [row for row, span in enumerate(plan.spans) if span.logit_rows]
            return logits[:count] if len(sampled) == count else logits.index_select(0, torch.tensor(sampled))

    def _rows(self) -> RowsExecutor:
        self.few = self.few or RowsExecutor(self.model, self.store, FEW_ROWS, self.threads)
        return self.few

    def _as_rows(self, plan: StepPlan) -> Tensor:
        few = self._rows()
        if max(span.length for span in plan.spans) > few.most < FEW_ROWS[-1]:  # it would take many small calls
            return self.rest.forward(plan)
        logits, self.kernel_seconds = few.forward(plan), few.kernel_seconds
        return logits


def executor_for(
    model: Transformer,
    store: KVStore,
    lanes: Lanes,
    unit: Unit = "block",
    batch_invariant: bool = False,
    fell_back: Callable[[str], None] = lambda why: None,
    threads: StepThreads | None = None,
) -> Executor:
    """What runs `model`, whose modules are on `lanes.blocks`. A model on the lane mlir that its compiled step cannot
    carry out decodes by its modules, on the same lane. Raises WorkbenchError where only the step is on that lane, and
    for `batch_invariant` (see invariant.py) where the model or its cache cannot keep it. `fell_back` as in `Vetted`;
    `threads` runs compiled steps."""
    if batch_invariant:
        return RowsExecutor(model, store, threads=threads)
    if model.device.type == "cuda" and model.lane is Lane.TRITON:
        return CapturedExecutor(model, store)
    if model.lane is Lane.INDUCTOR:
        blocks: Executor = CompiledExecutor(model, store, lanes.reads, unit, lanes.decode)
    else:
        blocks = EagerExecutor(model, store)
    if lanes.decode is not Lane.MLIR or store_problem(store.shapes) is not None:
        return blocks
    if not lanes.vetted:
        blocks = Vetted(model, blocks, lambda: EagerExecutor(model, store), fell_back)
    problem = step_problem(model.spec)
    if problem and model.lane is not Lane.MLIR:
        raise WorkbenchError(f"lane mlir: decodes no step of {model.spec.name}: {problem}")
    return blocks if problem else MlirExecutor(model, store, blocks, threads)


def evicting(
    model: Transformer,
    store: KVStore,
    lanes: Lanes,
    fast: Executor,
    evictor: Evictor | None,
    fell_back: Callable[[str], None] = lambda why: None,
) -> Executor:
    """`fast`, and where the queries of a step are to be seen the model's blocks, on the lanes that carry them out. They
    are compiled for themselves, and so vetted for themselves where others are (`fell_back` as in `Vetted`)."""
    if evictor is None:
        return fast
    seen, layers = observed(store)
    if model.lane is Lane.INDUCTOR:
        blocks: Executor = CompiledExecutor(model, seen, lanes.reads, "block", lanes.blocks)
        if not lanes.vetted:
            blocks = Vetted(model, blocks, lambda: EagerExecutor(model, seen), fell_back)
    else:
        blocks = EagerExecutor(model, seen)
    return EvictingExecutor(fast, blocks, layers, evictor)
