"""The oracle: one text, no cache, no batch, no pages, no lane. Slow on purpose, and read in one sitting.

It shares the weights with the model and nothing else.
"""

from __future__ import annotations

import torch
from einops import einsum, rearrange
from torch import Tensor

from workbench.model.latent_spec import LatentAttention
from workbench.model.rotary import frequencies
from workbench.model.spec import Attention, Experts, Gate, LayerKind, ModelSpec, Rotary
from workbench.model.transformer import Transformer


@torch.inference_mode()
def logits(model: Transformer, ids: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Every position's logits for ids [token], computed in `dtype` (the model's own unless given)."""
    spec = model.spec
    w = model.dense_state(dtype or model.dtype)
    x = w["embedding.weight"][ids]
    if spec.embedding_scale != 1:  # as the model has it, in its own type
        x = x * torch.tensor(spec.embedding_scale, dtype=model.dtype).to(x.dtype)
    for index, kind in enumerate(spec.layers):
        at = f"blocks.{index}."
        rotary = kind.attention.rotary or spec.rotary
        h = _norm(x, w[at + "attention_norm.weight"], *_style(spec))
        read = (_latent if isinstance(kind.attention, LatentAttention) else _grouped)(h, w, at, kind.attention, rotary)
        x = x + (_norm(read, w[at + "attention_post_norm.weight"], *_style(spec)) if kind.post_norms else read)
        h = _norm(x, w[at + "feedforward_norm.weight"], *_style(spec))
        made = _feedforward(h, w, at, kind) if kind.experts is None else _mixture(h, w, at, kind, kind.experts)
        x = x + (_norm(made, w[at + "feedforward_post_norm.weight"], *_style(spec)) if kind.post_norms else made)
    x = _norm(x, w["norm.weight"], *_style(spec))
    logits = x @ w["embedding.weight" if spec.tied else "head.weight"].T
    return spec.final_softcap * torch.tanh(logits / spec.final_softcap) if spec.final_softcap else logits


def greedy(model: Transformer, prompt_ids: list[int], max_tokens: int, dtype: torch.dtype | None = None) -> list[int]:
    """The first `max_tokens` tokens of the most likely continuation, each from the whole text anew."""
    ids = list(prompt_ids)
    for _ in range(max_tokens):
        ids.append(int(logits(model, torch.tensor(ids), dtype)[-1].argmax()))
    return ids[len(prompt_ids) :]


def _grouped(h: Tensor, w: dict[str, Tensor], at: str, a: Attention, rotary: Rotary) -> Tensor:
    qkv = rearrange(_linear(h, w, at + "attention.qkv"), "token (head dim) -> token head dim", dim=a.dim)
    q, k, v = qkv.split([a.heads, a.groups, a.groups], dim=1)
    q, k = _turn(q, rotary), _turn(k, rotary)
    q = rearrange(q, "token (group share) dim -> group share token dim", group=a.groups)
    scores = einsum(q, k, "group share token dim, context group dim -> group share token context")
    weights = torch.softmax((scores * a.dim**-0.5).masked_fill(_hidden(len(h), a), -torch.inf), dim=-1)
    mixed = einsum(weights, v, "group share token context, context group dim -> token group share dim")
    heads = rearrange(mixed, "token group share dim -> token (group share dim)")
    return _linear(heads, w, at + "attention.output")


def _latent(h: Tensor, w: dict[str, Tensor], at: str, a: LatentAttention, rotary: Rotary) -> Tensor:
    """As published: every head's keys and values are made from the latents (DeepSeek-V2, 2024, section 2.1)."""
    at += "attention."
    query, latent, key = _linear(h, w, at + "down").split([a.down - a.dim, a.latent, a.rope_dim], dim=-1)
    if a.query_latent is not None:
        query = _linear(_norm(query, w[at + "query_norm.weight"], a.norm_eps), w, at + "query_up")
    query = rearrange(query, "token (head dim) -> token head dim", head=a.heads)
    latent = _norm(latent, w[at + "latent_norm.weight"], a.norm_eps)
    made = einsum(latent, w[at + "up"], "token latent, head row latent -> token head row")
    plain_key, value = made.split([a.plain_dim, a.value_dim], dim=-1)
    plain, turned = query.split([a.plain_dim, a.rope_dim], dim=-1)
    turned, key = _turn(turned, rotary, a.interleaved), _turn(key[:, None], rotary, a.interleaved)
    scores = einsum(plain, plain_key, "token head dim, context head dim -> head token context")
    scores = scores + einsum(turned, key[:, 0], "token head dim, context dim -> head token context")
    scale = (a.plain_dim + a.rope_dim) ** -0.5 if a.scale is None else a.scale
    weights = torch.softmax((scores * scale).masked_fill(_hidden(len(h), a), -torch.inf), dim=-1)
    heads = einsum(weights, value, "head token context, context head dim -> token head dim")
    return _linear(rearrange(heads, "token head dim -> token (head dim)"), w, at + "output")


def _hidden(tokens: int, a: Attention | LatentAttention) -> Tensor:
    """True where a query [token, 1] does not see a key [1, token]."""
    key = torch.arange(tokens)[None]
    far = torch.arange(tokens)[:, None] - key
    return (far < 0) if a.window is None else (far < 0) | ((far >= a.window) & (key >= a.sinks))


def _feedforward(h: Tensor, w: dict[str, Tensor], at: str, kind: LayerKind) -> Tensor:
    gate, up = _linear(h, w, at + "feedforward.gate_up").chunk(2, dim=-1)
    return _linear(_gated(gate, up, kind.gate), w, at + "feedforward.down")


def _mixture(h: Tensor, w: dict[str, Tensor], at: str, kind: LayerKind, experts: Experts) -> Tensor:
    """One token after another, each through its own experts."""
    at += "feedforward."
    rows = []
    for token, scores in zip(h, _linear(h, w, at + "router"), strict=True):
        best = scores.topk(experts.used)
        made = torch.zeros_like(token)
        for weight, number in zip(torch.softmax(best.values, dim=-1), best.indices.tolist(), strict=True):
            gate_up, down = w[at + "gate_up"][number] @ token, w[at + "down"][number]
            if kind.feedforward_bias:
                gate_up = gate_up + w[at + "gate_up_bias"][number]
            out = down @ _gated(*gate_up.chunk(2), kind.gate)
            made = made + weight * (out + w[at + "down_bias"][number] if kind.feedforward_bias else out)
        rows.append(made)
    return torch.stack(rows)


def _gated(gate: Tensor, up: Tensor, kind: Gate) -> Tensor:
    if kind.kind == "silu":
        return torch.nn.functional.silu(gate) * up
    if kind.kind == "gelu_tanh":
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    gate, up = gate.clamp(max=kind.limit), up.clamp(-kind.limit, kind.limit)
    return gate * torch.sigmoid(kind.alpha * gate) * (up + 1)


def _style(spec: ModelSpec) -> tuple[float, float]:
    return spec.norm_eps, spec.norm_offset


def _norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (weight + offset)


def _linear(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    out = x @ w[name + ".weight"].T
    return out + w[name + ".bias"] if name + ".bias" in w else out


def _turn(x: Tensor, rotary: Rotary, interleaved: bool = False) -> Tensor:
    """x [token, head, dim], each pair turned by its position's angle."""
    angles = torch.outer(torch.arange(len(x)).double(), frequencies(rotary, x.shape[-1]))[:, None]
    cos, sin = (rotary.scaling.amplitude * part.to(x.dtype) for part in (angles.cos(), angles.sin()))
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
