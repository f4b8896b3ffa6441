"""Execute steps of many tokens on the backend mlir: compiled functions for each block's two sides, over panel weights.

The cache's own write and attention run between them, for any kind of cache layer. Rows of all sequences, prefills and
decodes alike, go through a side together. The residual stream is float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import Tensor

from compiled_kernels import Lane
from compiled_kernels.blocked import in_panels
from compiled_kernels.mlir_text import Target
from compiled_kernels.prefill import BlockShape, PrefillBlock
from compiled_kernels.prefill.block import Buffers
from workbench.batch import TokenBatch
from workbench.cache.store import KVStore
from workbench.engine.alike import Watch
from workbench.engine.angles import Angles
from workbench.engine.mlir_step import check_step, step_shape, step_tensors
from workbench.engine.packing import pack
from workbench.engine.plan import StepPlan
from workbench.engine.rows import RowsExecutor
from workbench.model.layers import Block
from workbench.model.parts import Linear
from workbench.model.rotary import RotaryTable
from workbench.model.transformer import Transformer

SIDES = ("before", "after")
ROOM = 512  # rows that buffers are made for at first; they double


class PrefillExecutor:
    """Execute any step of a model with weights in panels; `token_parallel` returns the executor that
    computes logits."""

    def __init__(self, model: Transformer, store: KVStore, head: Callable[[], RowsExecutor]):
        self.model, self.store, self.head = model, store, head
        self.kernel_seconds: float | None = None  # attention is called from Python
        self._angles = {turn: Angles(cast(RotaryTable, table)) for turn, table in enumerate(model.rotary)}
        self._room, self._made, self._watch = 0, 0, Watch(model)
        self._blocks: list[PrefillBlock] = []

    @property
    def compiles(self) -> int:
        return self._made

    @property
    def artifacts(self) -> Mapping[str, str]:
        kinds = list(dict.fromkeys(tuple(kernel.digest for kernel in block.kernels) for block in self._blocks))
        return {
            f"{side} attention {i}": digest
            for i, pair in enumerate(kinds)
            for side, digest in zip(SIDES, pair, strict=True)
        }

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> Tensor:
        if self._watch.changed:
            self._blocks, self._watch = [], Watch(self.model)
        batch = pack(plan, self.store.page_size, self.model.device)
        x = self._hidden(batch)
        return self.head().logits(x[batch.sample_rows])

    def _hidden(self, batch: TokenBatch) -> Tensor:
        """Return the last block's output for each token, float32, in a buffer: [token, hidden]."""
        rows, model = batch.rows, self.model
        blocks = self._for(rows)
        for turn, angles in self._angles.items():
            told = next((block for block in blocks if block.shape.layer.turn == turn), None)
            if told is not None:
                for mine, angle in zip(told.angles, angles(batch.positions), strict=True):
                    mine[:rows] = angle
        x = blocks[0].x[:rows]
        x.copy_(model.embed(batch.ids))
        for block, module, cache in zip(blocks, model.blocks, self.store.layers, strict=True):
            attention = cast(Block, module).attention
            q, k, v = block.before(rows)
            cache.write(k, v, batch, Lane.MLIR)
            block.after(attention.read(q, batch, cache, Lane.MLIR))
        return x

    def _for(self, rows: int) -> list[PrefillBlock]:
        """Return the model's blocks, bound to buffers of at least `rows` rows."""
        if rows > self._room or not self._blocks:
            check_step(self.model, self.store)
            self._room = max(ROOM, self._room, 1 << (rows - 1).bit_length())
            buffers, tensors = Buffers(self._room), step_tensors(self.model, self.store)
            step = step_shape(self.model, self.store.page_size, 1, self.store.shapes)
            grown, self._blocks = bool(self._blocks), []
            for index, layer in enumerate(step.layers):
                shape = BlockShape(layer, self.model.spec.width, self.model.spec.norm_eps, step.kind, Target.here())
                names = {named.name for named in (*shape.before, *shape.after)} - shape.buffers().keys()
                own = {name: tensors[f"{name}_{index}"] for name in names}
                self._blocks.append(PrefillBlock(shape, own, buffers))
            self._made += 0 if grown else len(self.artifacts)  # for more rows the same code is bound anew
        return self._blocks


def all_in_panels(model: Transformer) -> bool:
    """Return whether every product of the model's blocks has its weight in panels."""
    return all(in_panels(part.weight) for part in model.blocks.modules() if isinstance(part, Linear))
