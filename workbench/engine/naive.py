"""The oracle: one text, no cache, no batch, no pages, no lane. Slow on purpose, and read in one sitting.

It shares the weights with the model and nothing else; what a user wrote for attention is called on whole texts.
"""

from __future__ import annotations

import torch
from einops import einsum, rearrange
from torch import Tensor

from compiled_kernels import Lane
from compiled_kernels.paged_attention.reference import attend
from workbench.batch import TokenBatch
from workbench.model.layers import attention_module
from workbench.model.quantized import WeightFormat
from workbench.model.rotary import frequencies, turn_of
from workbench.model.spec import Attention, LayerKind, ModelSpec
from workbench.model.transformer import Transformer
from workbench.user_parts import load


@torch.inference_mode()
def logits(model: Transformer, ids: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Every position's logits for ids [token], computed in `dtype` (the model's own unless given)."""
    spec = model.spec
    w = model.dense_state(dtype or model.dtype)
    x = w["embedding.weight"][ids]
    for index, kind in enumerate(spec.layers):
        at = f"blocks.{index}."
        h = _norm(x, w[at + "attention_norm.weight"], spec.norm_eps)
        attention = _attention if kind.attention.module is None else _own
        x = x + attention(h, w, at + "attention.", kind, spec)
        h = _norm(x, w[at + "feedforward_norm.weight"], spec.norm_eps)
        gate, up = _linear(h, w, at + "feedforward.gate_up").chunk(2, dim=-1)
        x = x + _linear(torch.nn.functional.silu(gate) * up, w, at + "feedforward.down")
    x = _norm(x, w["norm.weight"], spec.norm_eps)
    return x @ w["embedding.weight" if spec.tied else "head.weight"].T


def _attention(h: Tensor, w: dict[str, Tensor], at: str, kind: LayerKind, spec: ModelSpec) -> Tensor:
    """Normed rows [token, width] of a whole text -> what attention adds to them [token, width]."""
    tokens, a = len(h), kind.attention
    qkv = rearrange(_linear(h, w, at + "qkv"), "token (head dim) -> token head dim", dim=a.dim)
    q, k, v = qkv.split([a.heads, a.groups, a.groups], dim=1)
    if a.qk_norm:
        q = _norm(q, w[at + "query_norm.weight"], spec.norm_eps)
        k = _norm(k, w[at + "key_norm.weight"], spec.norm_eps)
    if a.position == "rotary":
        angles = torch.outer(torch.arange(tokens).double(), frequencies(a.rotary or spec.rotary, a.dim))
        q, k = _turn(q, angles), _turn(k, angles)
    k, v = (part.repeat_interleave(a.heads // a.groups, dim=1) for part in (k, v))  # a key head for each query head
    scores = einsum(q, k, "token head dim, context head dim -> head token context") * (a.scale or a.dim**-0.5)
    sinks = w[at + "sink_logits"] if a.sink_logits else None
    mixed = einsum(_weights(scores, a, sinks), v, "head token context, context head dim -> token head dim")
    return _linear(rearrange(mixed, "token head dim -> token (head dim)"), w, at + "output")


def _weights(scores: Tensor, a: Attention, sinks: Tensor | None) -> Tensor:
    """Scaled scores [head, token, context] -> weights, 0 for what a query does not see; a query that sees nothing
    weighs nothing."""
    heads, tokens, _ = scores.shape
    if a.softcap:
        scores = a.softcap * (scores / a.softcap).tanh()
    head, query, key = torch.meshgrid(torch.arange(heads), torch.arange(tokens), torch.arange(tokens), indexing="ij")
    far = query - key
    if a.position == "alibi":
        scores = scores - torch.tensor(_slopes(heads), dtype=scores.dtype)[:, None, None] * far
    if a.score is not None:
        scores = load(a.score)(scores, head, query, key)
    seen = far >= 0
    if a.window is not None:
        seen &= (far < a.window) | (key < a.sinks)
    if a.mask is not None:
        seen &= load(a.mask)(query, key)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(-1, tokens, 1)], dim=-1)
    blind = (scores[..., :tokens] == -torch.inf).all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(blind, 0.0), dim=-1)[..., :tokens].masked_fill(blind, 0.0)


def _slopes(heads: int) -> list[float]:
    """ALiBi's, by its authors' own recipe."""
    if heads & (heads - 1) == 0:
        return [2.0 ** (-8.0 * n / heads) for n in range(1, heads + 1)]
    below = 2 ** (heads.bit_length() - 1)
    return _slopes(below) + _slopes(2 * below)[::2][: heads - below]


class _WholeText:
    """Stands in for a cache: keys and values of one whole text, in order, in no pages and on no lane."""

    def write(self, k: Tensor, v: Tensor, batch: object, lane: object) -> None:
        self.k, self.v = k, v

    def attend(self, q, batch, scale, mask, lane, softcap=0.0, sink_logits=None, score=None) -> Tensor:
        return attend(q, self.k, self.v, 0, scale, mask, softcap, sink_logits, score)


def _own(h: Tensor, w: dict[str, Tensor], at: str, kind: LayerKind, spec: ModelSpec) -> Tensor:
    """The same by an attention module of the user's own: only its cache and its batch are plain."""
    module = attention_module(kind.attention, spec.width, Lane.EAGER, WeightFormat(), spec.norm_eps, h.dtype)
    mine = {name.removeprefix(at): values for name, values in w.items() if name.startswith(at)}
    module.load_state_dict(mine, strict=False)
    cos = sin = None
    if turn := turn_of(spec, kind.attention):
        angles = torch.outer(torch.arange(len(h)).double(), frequencies(*turn))
        cos, sin = angles.cos().to(h.dtype), angles.sin().to(h.dtype)
    q, k, v = module.project(h, cos, sin)
    cache, rows = _WholeText(), torch.arange(len(h))
    batch = TokenBatch(rows, rows, torch.tensor([0, len(h)]), torch.tensor([len(h)]), (), (), rows, False)
    cache.write(k, v, batch, Lane.EAGER)
    return module.close(module.read(q, batch, cache, Lane.EAGER))  # type: ignore[arg-type]


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
