"""Compute steps of many tokens on the backend mlir: compiled functions for the parts of a block before and after
attention, with weights in panels.

Between these two functions, the cache layer writes keys and values and computes attention. Rows of all sequences,
prefills and decodes, are computed together. The residual stream is float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_kernels import Backend
from compiled_kernels.blocked.layout import PANEL, in_panels
from compiled_kernels.builder.target import Target
from compiled_kernels.prefill import BlockShape, PrefillBlock
from compiled_kernels.prefill.block import PrefillBuffers
from workbench.batch import TokenBatch
from workbench.executors.early_layers import LayerTap
from workbench.executors.programs.decode_step import check_mlir_step, step_shape, step_tensors
from workbench.executors.programs.kernels import two_sides
from workbench.executors.programs.program import StepProgram, Timed
from workbench.executors.programs.rows import RowsProgram
from workbench.kv_cache.store import KVStore
from workbench.model.feedforward import GatedMLP, MixtureOfExperts
from workbench.model.linear import Linear
from workbench.model.transformer import Transformer
from workbench.scheduler.plan import StepPlan

SIDES = ("before", "after")
INITIAL_ROWS = 512  # initial rows of the buffers; they double when needed


class PrefillProgram(StepProgram):
    """A program that computes any batch of a model with weights in panels (see compiled_kernels/blocked/layout.py);
    `rows` computes its logits, `attention` reads the cache.
    """

    kind, resets = "prefill", True
    described = two_sides("mlir: a compiled function for each side of a block's attention", "mlir", "mlir")

    def __init__(self, model: Transformer, store: KVStore, rows: RowsProgram, attention: Backend = Backend.MLIR):
        super().__init__(model, store)
        self.rows, self.attention, self._max_rows = rows, attention, 0
        self.reset()

    def reset(self) -> None:
        self._blocks, self.artifacts = list[PrefillBlock](), {}

    def rows_of(self, plan: StepPlan) -> None:
        return None

    @torch.inference_mode()
    def __call__(self, batch: TokenBatch, layers: tuple[int, ...] = ()) -> Tensor:
        tap = LayerTap(layers, batch.logits_indices)
        x = self._hidden(batch, tap)
        logits = self.rows.compute_logits(x[batch.logits_indices])
        return tap.beside(logits) if layers else logits

    def time_functions(self, timed: Timed, tokens: int) -> None:
        for layer, block in enumerate(self._for(tokens)):
            for side in SIDES:
                setattr(block, side, timed(getattr(block, side), f"{side} attention {layer}"))

    def _hidden(self, batch: TokenBatch, tap: LayerTap) -> Tensor:
        """Return the last block's output for each token, float32, in a buffer: [token, hidden]."""
        rows, model = batch.num_tokens, self.model
        blocks = self._for(rows)
        layers = ((block.shape.layer.rotary_index, block.angles) for block in blocks)
        bound = {rotary: angles for rotary, angles in layers if rotary is not None}
        self.rows.angles.fill(bound, batch.positions)
        x = blocks[0].x[:rows]
        x.copy_(model.embed(batch.token_ids))
        tap.note(0, x)
        for layer, (block, module, cache) in enumerate(zip(blocks, model.blocks, self.store.layers, strict=True)):
            block.after(module.attention.write_and_read(block.before(rows), batch, cache, self.attention))
            tap.note(layer + 1, x)
            if self.store.on_layer is not None:
                self.store.on_layer(layer)
        return x

    def _for(self, rows: int) -> list[PrefillBlock]:
        """Return the model's blocks, bound to buffers of at least `rows` rows."""
        if rows > self._max_rows or not self._blocks:
            check_mlir_step(self.model, self.store)
            self._max_rows = max(INITIAL_ROWS, self._max_rows, 1 << (rows - 1).bit_length())
            buffers, tensors = PrefillBuffers(self._max_rows), step_tensors(self.model, self.store)
            step = step_shape(self.model, self.store.page_size, 1, self.store.specs)
            grown, self._blocks = bool(self._blocks), []
            for index, layer in enumerate(step.layers):
                shape = BlockShape(
                    layer,
                    self.model.spec.hidden_size,
                    self.model.spec.norm.eps,
                    step.dtype,
                    Target.current(),
                    step.norm_dtype,
                )
                names = {named.name for named in (*shape.before, *shape.after)} - shape.buffers().keys()
                own = {name: tensors[f"{name}_{index}"] for name in names}
                self._blocks.append(PrefillBlock(shape, own, buffers))
            kinds = dict.fromkeys(tuple(kernel.digest for kernel in block.kernels) for block in self._blocks)
            self.artifacts = {
                f"{side} attention {i}": digest
                for i, pair in enumerate(kinds)
                for side, digest in zip(SIDES, pair, strict=True)
            }
            self.made += 0 if grown else len(self.artifacts)  # for more rows the same code is bound to larger buffers
        return self._blocks


def weights_in_panels(model: Transformer) -> bool:
    """Return whether every product in the model's blocks has its weight in panels, and no block has a mixture of
    experts.
    """
    parts = tuple(model.blocks.modules())
    laid_out = all(in_panels(part.weight) for part in parts if isinstance(part, Linear))
    return laid_out and pairs_problem(model) is None and not any(isinstance(part, MixtureOfExperts) for part in parts)


def pairs_problem(model: Transformer) -> str | None:
    """Return the reason why the panels of gate and up cannot be interleaved in a compiled block; None if they can."""
    for part in model.blocks.modules():
        if isinstance(part, GatedMLP) and part.down.in_features % PANEL:
            return f"panels want a feed-forward in multiples of {PANEL} columns, not of {part.down.in_features}"
    return None
