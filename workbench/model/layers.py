"""Attention and the block of a decoder. Each module is given its backend; none knows which others there are."""

from __future__ import annotations

from typing import cast

import torch
from einops import rearrange
from torch import Tensor, nn

import compiled_kernels
from compiled_kernels import Lane
from workbench.batch import TokenBatch
from workbench.cache.store import Layer
from workbench.model.feedforward import feedforward
from workbench.model.latent import LatentAttention
from workbench.model.latent_spec import LatentAttention as LatentSpec
from workbench.model.own_parts import load_module, mask_of, score_of
from workbench.model.parts import Linear, Norm
from workbench.model.quantized import WeightFormat
from workbench.model.spec import AnyAttention, LayerKind
from workbench.model.spec import Attention as AttentionSpec
from workbench.user_parts import build

Angles = Tensor | None  # [token, dim / 2]; None where heads are not rotated
STORED = ("qkv.", "output.", "query_norm.", "key_norm.", "sink_logits")  # parameters of attention that a state holds


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al., 2023): project and rotate, attend to the cache, project back.

    A custom module extends this one. It is built with the same values and `arguments` of its own, may hold
    further parameters, and may give `q` any shape that its `attend` takes; `k` and `v` are what the cache holds.
    """

    def __init__(
        self, spec: AttentionSpec, width: int, lane: Lane, format: WeightFormat, eps: float = 1e-5, offset: float = 0.0
    ):
        """Build the module; `eps` and `offset` are those of the norms of queries and keys."""
        super().__init__()
        self.spec = spec
        self.lane = lane
        self.scale = spec.dim**-0.5 if spec.scale is None else spec.scale
        self.mask, self.score = mask_of(spec), score_of(spec)
        stored = lane, format.blocks, format.group, format.activations_of(format.blocks)
        self.qkv = Linear(width, (spec.heads + 2 * spec.groups) * spec.dim, spec.input_bias, *stored)
        self.output = Linear(spec.heads * spec.dim, width, spec.output_bias, *stored)
        self.query_norm = Norm(spec.dim, eps, lane, offset) if spec.qk_norm else None
        self.key_norm = Norm(spec.dim, eps, lane, offset) if spec.qk_norm else None
        self.sink_logits = nn.Parameter(torch.empty(spec.heads)) if spec.sink_logits else None

    def project(self, x: Tensor, cos: Angles, sin: Angles) -> tuple[Tensor, Tensor, Tensor]:
        """Project x [token, hidden] to queries, keys and values.

        Args:
            x: normed hidden states.
            cos: cosines [token, head_dim / 2] of the tokens' positions; None where heads are not rotated.
            sin: sines, likewise.

        Returns:
            q [token, head, head_dim], k and v [token, kv_head, head_dim]; q and k normed and rotated where the spec
                says so.
        """
        heads, groups = self.spec.heads, self.spec.groups
        rows = rearrange(self.qkv(x), "token (head dim) -> token head dim", dim=self.spec.dim)
        q, k, v = rows.split([heads, groups, groups], dim=1)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = _normed(q, self.query_norm), _normed(k, self.key_norm)
        return self.turn(q, cos, sin), self.turn(k, cos, sin), v

    def turn(self, x: Tensor, cos: Angles, sin: Angles) -> Tensor:
        return x if cos is None or sin is None else compiled_kernels.rotary(x, cos, sin, self.lane)

    def read(self, q: Tensor, batch: TokenBatch, cache: Layer, lane: Lane | None = None) -> Tensor:
        """Attend to everything written so far: [token, head, head_dim]; on the module's backend unless given."""
        lane = lane or self.lane
        return cache.attend(q, batch, self.scale, self.mask, lane, self.spec.softcap, self.sink_logits, self.score)

    def close(self, mixed: Tensor) -> Tensor:
        """Project the result of attention back: [token, head, head_dim] -> [token, hidden]."""
        return self.output(rearrange(mixed, "token head dim -> token (head dim)"))


def _normed(heads: Tensor, norm: Norm) -> Tensor:
    rows = rearrange(heads, "token head dim -> (token head) dim")
    return rearrange(norm(rows), "(token head) dim -> token head dim", head=heads.shape[1])


def attention_of(
    spec: AnyAttention, width: int, lane: Lane, format: WeightFormat, eps: float, offset: float = 0.0
) -> Attention | LatentAttention:
    """Build the module of one layer's attention: built-in, or custom. Raises WorkbenchError where that cannot be
    built."""
    if isinstance(spec, LatentSpec):
        return LatentAttention(spec, width, lane, format)
    if spec.module is None:
        return Attention(spec, width, lane, format, eps, offset)
    found, name = load_module(spec.module), f"module {spec.module.path}"
    offsets = (offset,) if offset else ()  # few models have one: only then a module must take it
    return cast(Attention, build(found, spec.module.arguments, name, spec, width, lane, format, eps, *offsets))


def attention_module(
    spec: AttentionSpec, width: int, lane: Lane, format: WeightFormat, eps: float, offset: float, dtype: torch.dtype
) -> Attention | LatentAttention:
    """Build a custom module in memory: the random numbers that it draws are the same every time."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        return attention_of(spec, width, lane, format, eps, offset).to(dtype).requires_grad_(False)


class Block(nn.Module):
    """One layer, normed before each part and, with `post_norms`, after it too (Gemma 2). `before_attention` and
    `after_attention` are the two sides of the read from the cache."""

    def __init__(self, kind: LayerKind, width: int, eps: float, lane: Lane, format: WeightFormat, offset: float = 0.0):
        """Build the block; `offset` is added to the weights of the norms."""
        super().__init__()
        norm = width, eps, lane, offset
        self.attention_norm = Norm(*norm)
        self.attention = attention_of(kind.attention, width, lane, format, eps, offset)
        self.feedforward_norm = Norm(*norm)
        self.feedforward = feedforward(kind, width, lane, format)
        self.attention_post_norm = Norm(*norm) if kind.post_norms else nn.Identity()
        self.feedforward_post_norm = Norm(*norm) if kind.post_norms else nn.Identity()

    def forward(self, x: Tensor, cos: Angles, sin: Angles, batch: TokenBatch, cache: Layer) -> Tensor:
        q, k, v = self.before(x, cos, sin)
        cache.write(k, v, batch, self.attention.lane)
        return self.after(x, self.attention.read(q, batch, cache))

    def before(self, x: Tensor, cos: Angles, sin: Angles) -> tuple[Tensor, Tensor, Tensor]:
        return self.attention.project(self.attention_norm(x), cos, sin)

    def after(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Add attention's result [token, head, head_dim] to x [token, hidden] and run the feed-forward: [token,
        hidden]."""
        read = self.attention_post_norm(self.attention.close(mixed))
        x, normed = self.feedforward_norm.after_sum(x, read)
        return x + self.feedforward_post_norm(self.feedforward(normed))
