"""The oracle: one text, no cache, no batch, no pages, no lane. Slow on purpose, and read in one sitting.

It shares the weights with the model and nothing else.
"""

from __future__ import annotations

import torch
from einops import einsum, rearrange
from torch import Tensor

from workbench.model.rotary import frequencies
from workbench.model.transformer import Transformer


@torch.inference_mode()
def logits(model: Transformer, ids: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Every position's logits for ids [token], computed in `dtype` (the model's own unless given)."""
    spec = model.spec
    w = model.dense_state(dtype or model.dtype)
    x = w["embedding.weight"][ids]
    for index, kind in enumerate(spec.layers):
        at = f"blocks.{index}."
        a = kind.attention
        h = _norm(x, w[at + "attention_norm.weight"], spec.norm_eps)
        qkv = rearrange(_linear(h, w, at + "attention.qkv"), "token (head dim) -> token head dim", dim=a.dim)
        q, k, v = qkv.split([a.heads, a.groups, a.groups], dim=1)
        angles = torch.outer(torch.arange(len(ids)).double(), frequencies(spec.rotary, a.dim))
        q, k = _turn(q, angles), _turn(k, angles)
        q = rearrange(q, "token (group share) dim -> group share token dim", group=a.groups)
        scores = einsum(q, k, "group share token dim, context group dim -> group share token context")
        far = torch.arange(len(ids))[:, None] - torch.arange(len(ids))[None]
        hidden = (far < 0) if a.window is None else (far < 0) | (far >= a.window)
        weights = torch.softmax((scores * a.dim**-0.5).masked_fill(hidden, -torch.inf), dim=-1)
        mixed = einsum(weights, v, "group share token context, context group dim -> token group share dim")
        heads = rearrange(mixed, "token group share dim -> token (group share dim)")
        x = x + _linear(heads, w, at + "attention.output")
        h = _norm(x, w[at + "feedforward_norm.weight"], spec.norm_eps)
        gate, up = _linear(h, w, at + "feedforward.gate_up").chunk(2, dim=-1)
        x = x + _linear(torch.nn.functional.silu(gate) * up, w, at + "feedforward.down")
    x = _norm(x, w["norm.weight"], spec.norm_eps)
    return x @ w["embedding.weight" if spec.tied else "head.weight"].T


def greedy(model: Transformer, prompt_ids: list[int], max_tokens: int, dtype: torch.dtype | None = None) -> list[int]:
    """The first `max_tokens` tokens of the most likely continuation, each from the whole text anew."""
    ids = list(prompt_ids)
    for _ in range(max_tokens):
        ids.append(int(logits(model, torch.tensor(ids), dtype)[-1].argmax()))
    return ids[len(prompt_ids) :]


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def _linear(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    out = x @ w[name + ".weight"].T
    return out + w[name + ".bias"] if name + ".bias" in w else out


def _turn(x: Tensor, angles: Tensor) -> Tensor:
    cos, sin = angles.cos()[:, None].to(x.dtype), angles.sin()[:, None].to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
