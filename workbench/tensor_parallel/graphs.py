"""Compute a batch on a rank by blocks that Inductor compiled, each with its two sums over ranks in the graph.

The sums are calls of an operator of their own, which no compiler looks into. They come in one order on all ranks, since
each needs what the one before gave; a block whose two sums could change places is refused (see inductor.py).
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
_RANKS: weakref.WeakValueDictionary[int, Ranks] = weakref.WeakValueDictionary()  # of this process, by `RankSum.number`


@torch.library.custom_op("workbench::sum_over_ranks", mutates_args=())
def _sum_over_ranks(own: Tensor, number: int) -> Tensor:
    return _RANKS[number].all_reduce(own)


@_sum_over_ranks.register_fake
def _(own: Tensor, number: int) -> Tensor:
    return torch.empty_like(own, memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class RankSum:
    """The sum over the ranks of this number, as a constant that a compiled block may hold."""

    number: int

    @classmethod
    def of(cls, ranks: Ranks) -> RankSum:
        _RANKS[number := next(_NUMBERS)] = ranks
        return cls(number)

    def __call__(self, own: Tensor) -> Tensor:
        return cast(Tensor, _sum_over_ranks(own, self.number))


class RankGraphs(InductorProgram):
    """Compute batches on this rank; decodes are padded to a bucket of rows by rank 0."""

    model: TensorParallelTransformer

    def __init__(self, model: TensorParallelTransformer, store: KVStore):
        total = RankSum.of(model.ranks)
        for block in model.blocks:
            block.sum_over_ranks = total
        super().__init__(model, store)

    @torch.inference_mode()
    def __call__(self, batch: TokenBatch, layers: tuple[int, ...] = ()) -> Tensor:
        """Return the logits of a batch's sampled rows, as `TensorParallelTransformer.compute_logits` does."""
        self.prepare(batch)
        run, samples = self._whole if batch.decode_only else self._mixed, len(batch.logits_indices)
        x = self.sampled_rows(batch, run)
        self.model.ranks.record([x[:samples]])
        return self.model.gather_logits(self.head(self.model, x)[:samples])
