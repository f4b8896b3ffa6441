"""What eviction is to compute, said plainly: one text, one token at a time, and for each layer a list of what it keeps.

No pages, no batch, no chunks, no lane; only the model's own projections are shared with the runner.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from workbench.cache.budget import Budget
from workbench.cache.evict import Evict
from workbench.model.layers import Attention, Block
from workbench.model.transformer import Transformer


class _Kept:
    """One layer's keys and values [kept, group, dim], and the attention that each token has received [kept]."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.mass: list[Tensor] = []

    def choose(self, policy: Evict, count: int) -> None:
        stays = policy.keep(torch.stack(self.mass), count).tolist()
        self.keys, self.values = [self.keys[i] for i in stays], [self.values[i] for i in stays]
        self.mass = [self.mass[i] for i in stays]


@torch.inference_mode()
def evicted_rows(model: Transformer, policy: Evict, budget: Budget, ids: tuple[int, ...], prompt: int) -> Tensor:
    """Logits of every position of `ids`, of which `prompt` were given: [token, vocab]."""
    kept = [_Kept() for _ in model.blocks]
    most, rows = budget.most(prompt), []
    for position, token in enumerate(ids):
        held = len(kept[0].keys)
        if held >= most if budget.in_decode else position == prompt > most:
            for layer in kept:
                layer.choose(policy, budget.after(prompt))
        observes = policy.observes
        counts = observes is None or prompt - observes <= position < prompt
        rows.append(_row(model, kept, token, position, counts))
    return torch.cat(rows)


def _row(model: Transformer, kept: list[_Kept], token: int, position: int, counts: bool) -> Tensor:
    x = model.embed(torch.tensor([token]))
    for block, turn, layer in zip(model.blocks, model.turns, kept, strict=True):
        block = cast(Block, block)
        cos, sin = (None, None) if turn is None else model.rotary[turn](torch.tensor([position]))
        q, k, v = block.before(x, cos, sin)
        layer.keys.append(k[0])
        layer.values.append(v[0])
        layer.mass.append(torch.zeros((), dtype=torch.float64))
        scale, share = cast(Attention, block.attention).scale, q.shape[1] // k.shape[1]
        keys, values = (torch.stack(each).repeat_interleave(share, dim=1) for each in (layer.keys, layer.values))
        weights = ((keys * q).sum(-1) * scale).softmax(0)  # [kept, head]
        if counts:
            layer.mass = [mass + weight.sum() for mass, weight in zip(layer.mass, weights, strict=True)]
        x = block.after(x, (weights[..., None] * values).sum(0)[None])
    return model.logits_of(x)
