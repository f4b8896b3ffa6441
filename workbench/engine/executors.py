"""What carries out a step's plan: the modules as they stand, blocks that Inductor compiled, or a compiled step."""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

from compiled_kernels import Lane
from workbench.cache.store import KVStore
from workbench.engine.buckets import bucket_for
from workbench.engine.captured import CapturedExecutor
from workbench.engine.compiled import CompiledExecutor, settled
from workbench.engine.lanes import Lanes
from workbench.engine.mlir_step import MlirStep, store_problem
from workbench.engine.packing import pack
from workbench.engine.plan import StepPlan
from workbench.model.transformer import Transformer

Unit = Literal["block", "step"]


class Executor(Protocol):
    """`forward` gives the logits of the plan's sampled rows, in the order of its spans: [sample, vocab].

    They are valid until the next step. `compiles` counts what was compiled since it was made.
    """

    @property
    def compiles(self) -> int: ...

    def forward(self, plan: StepPlan) -> Tensor: ...


class EagerExecutor:
    """Runs the modules as written."""

    compiles = 0

    def __init__(self, model: Transformer, store: KVStore):
        self.model, self.store = model, store

    def forward(self, plan: StepPlan) -> Tensor:
        return settled(self.model(pack(plan, self.store.page_size, self.model.device), self.store))


class MlirExecutor:
    """Steps of decodes as one compiled function a bucket; `rest` carries out the others."""

    def __init__(self, model: Transformer, store: KVStore, rest: Executor):
        self.model, self.store, self.rest = model, store, rest
        self.steps: dict[int, MlirStep] = {}

    @property
    def compiles(self) -> int:
        return self.rest.compiles + len(self.steps)

    def forward(self, plan: StepPlan) -> Tensor:
        if not plan.decode_only:
            return self.rest.forward(plan)
        rows = bucket_for(len(plan.spans))
        if rows not in self.steps:
            self.steps[rows] = MlirStep(self.model, self.store, rows)
        with torch.inference_mode():
            batch = pack(plan, self.store.page_size, self.model.device, rows)
            logits = self.steps[rows](batch)
            # A slice where every sequence samples, which is nearly always: a selection would copy all logits.
            samples = len(batch.sample_rows)
            return logits[:samples] if samples == len(plan.spans) else logits[batch.sample_rows]


def executor_for(model: Transformer, store: KVStore, lanes: Lanes, unit: Unit = "block") -> Executor:
    """What runs `model`, whose modules are on `lanes.blocks`."""
    if model.device.type == "cuda" and model.lane is Lane.TRITON:
        return CapturedExecutor(model, store)
    if model.lane is Lane.INDUCTOR:
        blocks: Executor = CompiledExecutor(model, store, lanes.reads, unit, lanes.decode)
    else:
        blocks = EagerExecutor(model, store)
    whole = lanes.decode is Lane.MLIR and store_problem(store) is None
    return MlirExecutor(model, store, blocks) if whole else blocks
