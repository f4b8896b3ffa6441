"""Compute a batch on a rank with blocks compiled by Inductor, each with its two sums over ranks in the graph.

Each sum is a call of a custom operator, opaque to the compiler. The sums have the same order on all ranks, since each
depends on the result of the previous one; a block in which the two sums could be reordered is refused (see
inductor.py).
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from workbench.batch import TokenBatch
from workbench.executors.programs.inductor import InductorProgram
from workbench.kv_cache.store import KVStore
from workbench.tensor_parallel.ranks import Ranks
from workbench.tensor_parallel.transformer import TensorParallelTransformer

_NUMBERS = itertools.count()
_RANKS: weakref.WeakValueDictionary[int, Ranks] = weakref.WeakValueDictionary()  # by `RankSum.number`


@torch.library.custom_op("workbench::sum_over_ranks", mutates_args=())
def _sum_over_ranks(own: Tensor, number: int) -> Tensor:
    return _RANKS[number].all_reduce(own)


@_sum_over_ranks.register_fake
def _(own: Tensor, number: int) -> Tensor:
    return torch.empty_like(own, memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class RankSum:
    """The operation that sums a tensor over the ranks registered as `number`, as a constant in a compiled block."""

    number: int

    @classmethod
    def of(cls, ranks: Ranks) -> RankSum:
        _RANKS[number := next(_NUMBERS)] = ranks
        return cls(number)

    def __call__(self, own: Tensor) -> Tensor:
        return cast(Tensor, _sum_over_ranks(own, self.number))


class RankGraphs(InductorProgram):
    """The program of a rank that runs compiled blocks; rank 0 pads decode batches to a bucket of rows."""

    model: TensorParallelTransformer

    def __init__(self, model: TensorParallelTransformer, store: KVStore):
        total = RankSum.of(model.ranks)
        for block in model.blocks:
            block.sum_over_ranks = total
        super().__init__(model, store)

    @torch.inference_mode()
    def __call__(self, batch: TokenBatch, layers: tuple[int, ...] = ()) -> Tensor:
        """Return the logits of a batch's sampled rows, in the form of `TensorParallelTransformer.compute_logits`."""
        self.prepare(batch)
        run, samples = self._whole if batch.decode_only else self._mixed, len(batch.logits_indices)
        x = self.sampled_rows(batch, run)
        self.model.ranks.record([x[:samples]])
        return self.model.gather_logits(self.head(self.model, x)[:samples])
