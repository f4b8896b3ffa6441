"""Compute a step on all ranks as rows of compiled functions, one token per row, like `RowsProgram` on one rank.

    norm -> qkv -> attention -> output -> sum over ranks | norm -> gate | up -> down -> sum over ranks | ... -> head

Each half of a layer is a separate function, and the ranks' results are summed between the halves, in float32 and in the
order of ranks. Each row has its own order of summation in products and attention, and the sum over ranks is
elementwise: with a fixed number of ranks, a token has the same bits in every batch. The bits differ from those of a
single process, which sums products without a cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from compiled_kernels.decode_step import DecodeStep, StepShape
from compiled_kernels.decode_step.shape import Half
from compiled_kernels.decode_step.text import step_inputs
from workbench.batch import TokenBatch
from workbench.executors.packing import DECODE_BUCKETS
from workbench.executors.programs.decode_step import step_tensors
from workbench.executors.programs.rows import RowsProgram
from workbench.kv_cache.store import KVStore
from workbench.tensor_parallel.ranks import Ranks
from workbench.tensor_parallel.transformer import TensorParallelTransformer

HALVES: tuple[Half, ...] = ("attention", "feedforward")


class HalfSteps(DecodeStep):
    """All layers of a step, as two functions per layer (attention, feedforward), with a sum over ranks after each
    function. All functions share the buffers of the first, which have the layout of a `DecodeStep`.
    """

    def __init__(self, shape: StepShape, tensors: Mapping[str, Tensor], ranks: Ranks):
        self.shape, self.ranks = shape, ranks
        pool: dict[str, Tensor] = {}
        self.halves = [
            DecodeStep(own := replace(shape, layers=(layer,), half=half), _of_layer(own, tensors, index), pool)
            for index, layer in enumerate(shape.layers)
            for half in HALVES
        ]
        self.kernel, self._own = self.halves[0].kernel, pool
        self.x, self.lengths, self.logits, self.chosen = pool["x"], pool["lengths"], torch.empty(0), {}
        self.tables = tuple(pool[f"table_{i}"] for i in range(shape.num_page_tables))
        self.angles = {i: (pool[f"cos_{i}"], pool[f"sin_{i}"]) for i in shape.rotary_dims}

    def __call__(self, threads: int | None = None) -> None:
        added = self._own["added"]
        for half in self.halves:
            half(threads)
            self.x += self.ranks.all_reduce(added)


def _of_layer(shape: StepShape, tensors: Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
    """Return the input tensors of the one-layer step of the model's layer `index`."""
    names = [name for name, _ in step_inputs(shape)]
    return {name: tensors[f"{name.removesuffix('_0')}_{index}"] for name in names}


class RankRows(RowsProgram):
    """The program of a rank that computes a batch as rows, one token per row. Rank 0 splits plans into batches
    (`calls`), and posts each batch to the other ranks.
    """

    model: TensorParallelTransformer
    SIZES = DECODE_BUCKETS

    def __init__(self, model: TensorParallelTransformer, store: KVStore):
        super().__init__(model, store, self.SIZES)

    @torch.inference_mode()
    def __call__(self, batch: TokenBatch, layers: tuple[int, ...] = ()) -> Tensor:
        """Return the logits of a batch's sampled rows, in the form of `TensorParallelTransformer.compute_logits`."""
        x = self._hidden(batch).index_select(0, batch.logits_indices)
        self.model.ranks.record([x])
        return self.model.gather_logits(self._logits(x))

    def _build(self, shape: StepShape) -> DecodeStep:
        if not shape.layers:
            return super()._build(shape)
        return HalfSteps(shape, step_tensors(self.model, self.store), self.model.ranks)

    def compile_shape(self, part: str, rows: int) -> StepShape:
        return replace(super().compile_shape(part, rows), vocab_size=self.model.rank_spec.vocab_size)
