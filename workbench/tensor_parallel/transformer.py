"""One rank's share of a model."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_kernels import Backend
from workbench.kv_cache.format import CacheFormat, KVCacheSpec
from workbench.model.memory import cache_shapes
from workbench.model.quantized import WeightFormat
from workbench.model.spec import ModelSpec
from workbench.model.transformer import Transformer
from workbench.tensor_parallel.cut import Stretch, spec_of_rank
from workbench.tensor_parallel.ranks import Ranks


class TensorParallelTransformer(Transformer):
    """The share of one rank: its modules have the sizes of `rank_spec`, `spec` is the whole model's.

    What it takes and returns is as in a whole model, but for the logits, which rank 0 has alone. It computes together
    with the other ranks, within a task of `Ranks`.
    """

    ranks: Ranks
    rank_spec: ModelSpec

    @classmethod
    def of_rank(
        cls, spec: ModelSpec, state: dict[str, Tensor], backend: Backend, format: WeightFormat, ranks: Ranks
    ) -> TensorParallelTransformer:
        """Build the share of the model `spec` whose parameters, cut (see `cut_state`), are `state`."""
        model = cls.from_state(spec_of_rank(spec, ranks.rank, ranks.size), state, backend, format, ranks.all_reduce)
        model.ranks, model.rank_spec, model.spec = ranks, model.spec, spec
        return model

    def cache_shapes(self, format: CacheFormat | None = None) -> tuple[KVCacheSpec, ...]:
        """Return the cache shape of each layer of this rank."""
        return cache_shapes(self.rank_spec, format)

    def lookup(self, ids: Tensor) -> Tensor:
        """Look up token ids [token]: each rank those of its own part of the vocabulary."""
        first, end = self._vocabulary
        mine = (ids >= first) & (ids < end)
        rows = super().lookup(torch.where(mine, ids - first, 0))
        return self.ranks.all_reduce(rows * mine[:, None].to(rows.dtype))

    def compute_logits(self, x: Tensor) -> Tensor:
        """Compute logits [sample, hidden] -> [sample, vocab], float32 (float64 stays); of ranks but 0 their own part
        of the vocabulary alone."""
        self.ranks.record([x])  # all ranks have the same bits, or rank 0 says so
        own = super().compute_logits(x)
        size, ranks = self.spec.vocab_size, self.ranks.size
        widest = -(-size // ranks)
        parts = self.ranks.gather(F.pad(own, (0, widest - own.shape[1])))
        if self.ranks.rank:
            return own
        bounds = [Stretch(size, ranks).bounds(rank, ranks) for rank in range(ranks)]
        return torch.cat([part[:, : end - first] for part, (first, end) in zip(parts, bounds, strict=True)], dim=1)

    @property
    def bytes_per_weight(self) -> tuple[float, float]:
        """Return the bytes of a value of a matrix, scales included: in the blocks, and in the head."""
        blocks, head = super().bytes_per_weight
        first, end = self._vocabulary
        return blocks, head * self.spec.vocab_size / (end - first)

    @property
    def _vocabulary(self) -> tuple[int, int]:
        return Stretch(self.spec.vocab_size, self.ranks.size).bounds(self.ranks.rank, self.ranks.size)
