"""A naive model with eviction: one text, token by token, and the tokens that each key/value head keeps.

No pages, no batch, no chunks, no backend; only the model's own projections are shared with the runner.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from workbench.kv_cache.budget import EvictionBudget
from workbench.kv_cache.eviction import EvictionPolicy
from workbench.model.layers import Attention, TransformerBlock
from workbench.model.transformer import Transformer


class _HeadCache:
    """Keys and values [head_dim] of each token kept by one key/value head, and the attention that each has received."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.mass: list[Tensor] = []

    def add(self, k: Tensor, v: Tensor) -> None:
        """Add a token's key and value [head_dim]."""
        self.keys.append(k)
        self.values.append(v)
        self.mass.append(torch.zeros((), dtype=torch.float64))

    def attend(self, q: Tensor, scale: float, counts: bool) -> Tensor:
        """Attend with query heads [queries_per_kv, head_dim]: [queries_per_kv, head_dim]."""
        weights = (q @ torch.stack(self.keys).T * scale).softmax(-1)  # [share, kept]
        if counts:
            self.mass = [mass + weight.sum() for mass, weight in zip(self.mass, weights.T, strict=True)]
        return weights @ torch.stack(self.values)

    def evict(self, policy: EvictionPolicy, count: int) -> None:
        stays = policy.select(torch.stack(self.mass), count).tolist()
        self.keys, self.values = [self.keys[i] for i in stays], [self.values[i] for i in stays]
        self.mass = [self.mass[i] for i in stays]


@torch.inference_mode()
def evicted_logits(
    model: Transformer,
    policy: EvictionPolicy,
    budget: EvictionBudget,
    ids: tuple[int, ...],
    prompt: int,
    stored: Callable[[Tensor], Tensor] = lambda rows: rows,
) -> Tensor:
    """Return the logits [token, vocab] of every position of `ids`, the first `prompt` of which are the prompt.

    `stored` returns rows of keys or values [token, kv_head, head_dim] as the cache gives them back."""
    own = [[_HeadCache() for _ in range(shape.num_kv_heads)] for shape in model.cache_shapes()]
    sources = (shape.shared_with for shape in model.cache_shapes())
    kept = [heads if source is None else own[source] for heads, source in zip(own, sources, strict=True)]
    most, rows = budget.max_tokens(prompt), []
    for position, token in enumerate(ids):
        held = len(kept[0][0].keys)
        if held >= most if budget.in_decode else position == prompt > most:
            for head in itertools.chain(*own):
                head.evict(policy, budget.tokens_after_eviction(prompt))
        observes = policy.observes
        counts = observes is None or prompt - observes <= position < prompt
        rows.append(_row(model, kept, token, position, counts, stored))
    return torch.cat(rows)


def _row(
    model: Transformer,
    kept: list[list[_HeadCache]],
    token: int,
    position: int,
    counts: bool,
    stored: Callable[[Tensor], Tensor],
) -> Tensor:
    x = model.embed(torch.tensor([token]))
    for block, rotary, heads in zip(model.blocks, model.rotary_of_block, kept, strict=True):
        block = cast(TransformerBlock, block)
        cos, sin = (None, None) if rotary is None else model.rotary[rotary](torch.tensor([position]))
        q, k, v = block.before_attention(x, cos, sin)
        scale, shares = cast(Attention, block.attention).scale, q[0].chunk(len(heads))
        k, v = (rows if rows is None or not len(rows[0]) else stored(rows) for rows in (k, v))
        for head, key, value in zip(heads, k[0], v[0], strict=False):  # none, where the heads are another layer's
            head.add(key, value)
        found = [head.attend(query, scale, counts) for head, query in zip(heads, shares, strict=True)]
        x = block.after_attention(x, torch.cat(found)[None])
    return model.compute_logits(x)
