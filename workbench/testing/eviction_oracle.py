"""Compute a text naively with eviction: token by token, with a list of kept tokens for each key/value head.

No pages, no batch, no chunks, no backend; it shares only the model's projections with the runner.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from workbench.kv_cache.budget import EvictionBudget
from workbench.kv_cache.eviction import AnyPolicy, EvictionPolicy, LayerEvictionPolicy, LayerTokens
from workbench.model.mixer import AttentionMixer
from workbench.model.transformer import Transformer

Stored = Callable[[Tensor], Tensor]  # rows of keys or values [token, kv_head, head_dim] -> rows read from the cache


class _HeadCache:
    """The keys and values [head_dim] of the tokens kept by one key/value head, and their accumulated attention."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.mass: list[Tensor] = []

    def add(self, k: Tensor, v: Tensor) -> None:
        """Add a token's key and value [head_dim]."""
        self.keys.append(k)
        self.values.append(v)
        self.mass.append(torch.zeros((), dtype=torch.float64))

    def attend(self, q: Tensor, scale: float, counts: bool, decay: float) -> Tensor:
        """Return the attention of query heads `q` [queries_per_kv, head_dim]: [queries_per_kv, head_dim]."""
        weights = (q @ torch.stack(self.keys).T * scale).softmax(-1)  # [queries_per_kv, kept]
        if counts:
            self.mass = [decay * mass + weight.sum() for mass, weight in zip(self.mass, weights.T, strict=True)]
        return weights @ torch.stack(self.values)

    def keep(self, stays: Tensor) -> None:
        """Keep only the tokens of the mask `stays` [token]."""
        self.keys, self.values, self.mass = (
            [each for each, kept in zip(rows, stays.tolist(), strict=True) if kept]
            for rows in (self.keys, self.values, self.mass)
        )


def _evict(
    policy: AnyPolicy, layer: int, layers: list[list[_HeadCache]], budget: int, slots: int, stored: Stored
) -> None:
    """Evict the tokens of one layer that the policy does not keep, and store its merged rows, if it merges."""
    heads = layers[layer]
    keys, values = (torch.stack([torch.stack(getattr(head, name)) for head in heads]) for name in ("keys", "values"))
    mass = torch.stack([torch.stack(head.mass) for head in heads])
    tokens = LayerTokens(layer, len(layers), mass, slots, lambda: (keys.clone(), values.clone()))
    if isinstance(policy, LayerEvictionPolicy):
        keep = policy.select_layer(tokens, budget)
    else:
        keep = torch.zeros_like(mass, dtype=torch.bool)
        for head, row in enumerate(mass):
            keep[head, cast(EvictionPolicy, policy).select(row, budget)] = True
    if merge := getattr(policy, "merge", None):
        for name, old, new in zip(("keys", "values"), (keys, values), merge(tokens, keep), strict=True):
            rows = torch.where((new != old).any(-1, keepdim=True), stored(new.transpose(0, 1)).transpose(0, 1), old)
            for head, mine in zip(heads, rows, strict=True):
                setattr(head, name, list(mine))
    for head, mine in zip(heads, keep, strict=True):
        head.keep(mine)


@torch.inference_mode()
def evicted_logits(
    model: Transformer,
    policy: AnyPolicy,
    budget: EvictionBudget,
    ids: tuple[int, ...],
    prompt: int,
    stored: Stored = lambda rows: rows,
) -> Tensor:
    """Return the logits [token, vocab] of every position of `ids`; the first `prompt` ids are the prompt.

    `stored` maps rows of keys or values [token, kv_head, head_dim] to the values read from the cache."""
    shapes = model.cache_shapes()
    own = [[_HeadCache() for _ in range(shape.num_kv_heads)] if shape.shared_with is None else [] for shape in shapes]
    sources = (shape.shared_with for shape in shapes)
    kept = [heads if source is None else own[source] for heads, source in zip(own, sources, strict=True)]
    most, rows = budget.max_tokens(prompt), []
    for position, token in enumerate(ids):
        held = len(kept[0][0].keys)
        if held >= most if budget.in_decode else position == prompt > most:
            mine = [heads for heads in own if heads]
            tokens, slots = budget.tokens_after_eviction(prompt), budget.slots_after_eviction(prompt)
            for layer in range(len(mine)):
                _evict(policy, layer, mine, tokens, slots, stored)
        observes = policy.observes
        counts = observes is None or prompt - observes <= position < prompt
        rows.append(_row(model, kept, token, position, counts, getattr(policy, "decay", 1.0), stored))
    return torch.cat(rows)


def _row(
    model: Transformer,
    kept: list[list[_HeadCache]],
    token: int,
    position: int,
    counts: bool,
    decay: float,
    stored: Stored,
) -> Tensor:
    x = model.embed(torch.tensor([token]))
    for block, rotary, heads in zip(model.blocks, model.rotary_of_block, kept, strict=True):
        cos, sin = (None, None) if rotary is None else model.rotary[rotary](torch.tensor([position]))
        q, k, v = block.before_attention(x, cos, sin)
        assert isinstance(block.attention, AttentionMixer)
        scale, shares = block.attention.scale, q[0].chunk(len(heads))
        k, v = (rows if rows is None or not len(rows[0]) else stored(rows) for rows in (k, v))
        for head, key, value in zip(heads, k[0], v[0], strict=False):  # empty if the layer shares another layer's heads
            head.add(key, value)
        found = [head.attend(query, scale, counts, decay) for head, query in zip(heads, shares, strict=True)]
        x = block.after_attention(x, torch.cat(found)[None])
    return model.compute_logits(x)
