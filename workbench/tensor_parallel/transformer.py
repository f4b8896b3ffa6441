"""Define the model of one rank: its shard of a whole model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from compiled_kernels import Backend
from compiled_kernels.attention_rules import known_rules
from compiled_kernels.masks import Score, is_normalized
from workbench.kv_cache.format import CacheFormat, KVCacheSpec
from workbench.model.attention_spec import AnyAttentionSpec, AttentionSpec
from workbench.model.custom import build_mask, build_score
from workbench.model.layers import HeadRMSNorm
from workbench.model.memory import cache_shapes
from workbench.model.mixer import AttentionMixer
from workbench.model.quantized import WeightFormat
from workbench.model.spec import ModelSpec
from workbench.model.transformer import Transformer
from workbench.tensor_parallel.cut import Section, spec_of_rank
from workbench.tensor_parallel.ranks import Ranks, rows_per_exchange


@dataclass(frozen=True)
class ScoreOfHeads:
    """A score function that is written for all heads, applied to the heads of one rank; `first` is the first
    of them.
    """

    score: Score
    first: int

    @property
    def normalized(self) -> bool:
        return is_normalized(self.score)

    def __call__(self, score: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return self.score(score, head + self.first, query, key)


class NormOverRanks(nn.Module):
    """An RMSNorm over all query or key heads of a token, of which each rank has some [token, head, head_dim], with
    their weights. The squares are summed over all ranks, in float32 or wider. `copies` ranks hold each head.
    """

    def __init__(self, own: HeadRMSNorm, ranks: Ranks, copies: int):
        super().__init__()
        self.own, self.ranks, self.copies = own, ranks, copies

    def forward(self, heads: Tensor) -> Tensor:
        rows = rearrange(heads, "token head dim -> token (head dim)")
        exact = rows.to(torch.promote_types(rows.dtype, torch.float32))
        total = self.ranks.all_reduce(exact.square().sum(-1, keepdim=True) / self.copies)
        mean = total * self.copies / (rows.shape[1] * self.ranks.size)
        normed = exact * torch.rsqrt(mean + self.own.eps) * self.own.multiplier.to(exact.dtype)
        return rearrange(normed.to(rows.dtype), "token (head dim) -> token head dim", head=heads.shape[1])


class TensorParallelTransformer(Transformer):
    """One rank's shard of a model: its modules have the sizes of `rank_spec`; `spec` describes the whole model.

    Inputs and outputs equal those of a whole model, except that only rank 0 has all logits. All ranks compute together,
    within a task of `Ranks`.
    """

    ranks: Ranks
    rank_spec: ModelSpec
    only_largest = False  # whether this step needs only the largest logit of each row

    @classmethod
    def of_rank(
        cls, spec: ModelSpec, state: dict[str, Tensor], backend: Backend, format: WeightFormat, ranks: Ranks,
        dtype: torch.dtype | None = None,
    ) -> TensorParallelTransformer:  # fmt: skip
        """Build a rank's shard of the model `spec` from its sharded parameters `state` (see `cut_state`)."""
        own = spec_of_rank(spec, ranks.rank, ranks.size)
        model = cls.from_state(own, state, backend, format, ranks.all_reduce, dtype)
        model.ranks, model.rank_spec, model.spec = ranks, model.spec, spec
        for block, layer in zip(model.blocks, spec.layers, strict=True):
            assert isinstance(block.attention, AttentionMixer)  # see `cut.problem_of_ranks`
            _see_all_heads(block.attention, layer.attention, ranks)
        return model

    def cache_shapes(self, format: CacheFormat | None = None) -> tuple[KVCacheSpec, ...]:
        """Return the cache shape of each layer of this rank."""
        return cache_shapes(self.rank_spec, format)

    def lookup(self, ids: Tensor) -> Tensor:
        """Return the embeddings of token ids [token], each looked up by the rank that has this part of the vocabulary:
        [token, hidden].
        """
        first, end = self._vocabulary
        mine = (ids >= first) & (ids < end)
        rows = super().lookup(torch.where(mine, ids - first, 0))
        return self.ranks.all_reduce(rows * mine[:, None].to(rows.dtype))

    def compute_logits(self, x: Tensor) -> Tensor:
        """Return the logits of hidden states [sample, hidden]: [sample, vocab] in float32 (float64 stays) on rank 0.
        Other ranks return only their part of the vocabulary.
        """
        self.ranks.record([x])  # rank 0 reports an error if the ranks' bits differ
        return self.gather_logits(super().compute_logits(x))

    def gather_logits(self, own: Tensor) -> Tensor:
        """Return on rank 0 the logits [sample, vocab] joined from all ranks' parts `own`; on other ranks return `own`.

        If the step needs only the largest logits, each rank sends two numbers per row, and all other logits are -inf.
        """
        size, ranks = self.spec.vocab_size, self.ranks.size
        if not len(own):  # a prefill chunk without sampled rows
            return own.new_empty((0, size))
        if self.only_largest:
            return self._gather_largest(own)
        widest = -(-size // ranks)
        whole = own.new_empty((0 if self.ranks.rank else len(own), size))
        rows = rows_per_exchange(widest, own.itemsize)  # in chunks, without a second copy of all logits
        for begin in range(0, len(own), rows):
            self._gather_rows(own[begin : begin + rows], whole[begin : begin + rows], widest)
        return own if self.ranks.rank else whole

    def _gather_rows(self, own: Tensor, whole: Tensor, widest: int) -> None:
        """Write, on rank 0, the logits of all ranks to `whole` [sample, vocab]; a rank has at most `widest` columns."""
        gathered = self.ranks.gather(F.pad(own, (0, widest - own.shape[1])))
        if self.ranks.rank == 0:
            for rank, shard in enumerate(gathered):
                first, end = Section(self.spec.vocab_size, self.ranks.size).bounds(rank, self.ranks.size)
                whole[:, first:end] = shard[:, : end - first]

    def _gather_largest(self, own: Tensor) -> Tensor:
        """Gather, for each row and rank, the largest logit and its token, the first of equal ones (NaN counts as
        largest). Ranks have tokens in order, and token ids are exact in float32.
        """
        place = _first_largest(own)
        largest = own.gather(1, place[:, None])
        gathered = self.ranks.gather(torch.cat([largest, (place[:, None] + self._vocabulary[0]).to(own.dtype)], dim=1))
        if self.ranks.rank:
            return own
        best = gathered[_first_largest(gathered[..., 0].T), torch.arange(len(own), device=own.device)]
        whole = own.new_full((len(own), self.spec.vocab_size), -torch.inf)
        return whole.scatter_(1, best[:, 1:].long(), best[:, :1])

    @property
    def bytes_per_weight(self) -> tuple[float, float]:
        """Return the bytes per matrix value, scales included, in the blocks and in the head."""
        blocks, head = super().bytes_per_weight
        first, end = self._vocabulary
        return blocks, head * self.spec.vocab_size / (end - first)

    @property
    def _vocabulary(self) -> tuple[int, int]:
        return Section(self.spec.vocab_size, self.ranks.size).bounds(self.ranks.rank, self.ranks.size)


def _first_largest(rows: Tensor) -> Tensor:
    """Return the first index of each row's largest number, or of its first NaN: [row]. (torch's argmax on a CPU takes
    ten times as long as numpy's.)
    """
    return torch.from_numpy(rows.numpy().argmax(-1)) if rows.is_cpu else rows.argmax(-1)


def _see_all_heads(own: AttentionMixer, whole: AnyAttentionSpec, ranks: Ranks) -> None:
    """Give a rank's attention the parts that depend on all heads: head numbers, and norms over all heads."""
    heads = whole.num_heads // ranks.size
    own.mask = build_mask(whole, ranks.rank * heads, heads)
    if (score := build_score(whole)) is not None:
        own.score = ScoreOfHeads(score, ranks.rank * heads)
    own.rules = known_rules(own.mask, own.score)
    if isinstance(whole, AttentionSpec) and whole.qk_norm is not None and whole.qk_norm.over == "projection":
        for name, heads in (("query_norm", whole.num_heads), ("key_norm", whole.num_kv_heads)):
            if isinstance(norm := getattr(own, name), HeadRMSNorm):
                setattr(own, name, NormOverRanks(norm, ranks, max(1, ranks.size // heads)))
