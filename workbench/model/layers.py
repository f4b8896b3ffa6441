"""Attention and the block of a decoder. Each module is given its backend; none knows which others there are."""

from __future__ import annotations

from typing import cast

import torch
from einops import rearrange
from torch import Tensor, nn

import compiled_kernels
from compiled_kernels import Backend
from compiled_kernels.attention import AttentionParameters
from workbench.batch import TokenBatch
from workbench.custom import build_custom
from workbench.kv_cache.store import CacheLayer
from workbench.model.custom import build_mask, build_score, load_module
from workbench.model.feedforward import build_feedforward
from workbench.model.linear import Linear, RMSNorm
from workbench.model.mla import MLA
from workbench.model.quantized import WeightFormat
from workbench.model.spec import AnyAttentionSpec, LayerSpec
from workbench.model.spec import AttentionSpec as AttentionSpec
from workbench.model.spec import MLASpec as MLASpec

Angles = Tensor | None  # [token, dim / 2]; None where heads are not rotated
STORED_PARAMETERS = (
    "qkv.",
    "output.",
    "query_norm.",
    "key_norm.",
    "sink_logits",
)  # parameters of attention that a state holds


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al., 2023): project and rotate, attend to the cache, project back.

    A custom module extends this one. It is built with the same values and `arguments` of its own, may hold
    further parameters, and may give `q` any shape that its `attend` takes; `k` and `v` are what the cache holds.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        hidden_size: int,
        backend: Backend,
        format: WeightFormat,
        eps: float = 1e-5,
        offset: float = 0.0,
    ):
        """Build the module; `eps` and `offset` are those of the norms of queries and keys."""
        super().__init__()
        self.spec = spec
        self.backend = backend
        self.scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
        self.mask, self.score = build_mask(spec), build_score(spec)
        stored = backend, format.blocks, format.quant_group, format.activations_of(format.blocks)
        self.qkv = Linear(hidden_size, (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim, spec.qkv_bias, *stored)
        self.output = Linear(spec.num_heads * spec.head_dim, hidden_size, spec.o_proj_bias, *stored)
        self.query_norm = RMSNorm(spec.head_dim, eps, backend, offset) if spec.qk_norm else None
        self.key_norm = RMSNorm(spec.head_dim, eps, backend, offset) if spec.qk_norm else None
        self.sink_logits = nn.Parameter(torch.empty(spec.num_heads)) if spec.sink_logits else None

    def qkv_proj(self, x: Tensor, cos: Angles, sin: Angles) -> tuple[Tensor, Tensor, Tensor]:
        """Project x [token, hidden] to queries, keys and values.

        Args:
            x: normed hidden states.
            cos: cosines [token, head_dim / 2] of the tokens' positions; None where heads are not rotated.
            sin: sines, likewise.

        Returns:
            q [token, head, head_dim], k and v [token, kv_head, head_dim]; q and k normed and rotated where the spec
                says so.
        """
        heads, groups = self.spec.num_heads, self.spec.num_kv_heads
        rows = rearrange(self.qkv(x), "token (head dim) -> token head dim", dim=self.spec.head_dim)
        q, k, v = rows.split([heads, groups, groups], dim=1)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = _normed(q, self.query_norm), _normed(k, self.key_norm)
        return self.apply_rotary(q, cos, sin), self.apply_rotary(k, cos, sin), v

    def apply_rotary(self, x: Tensor, cos: Angles, sin: Angles) -> Tensor:
        return x if cos is None or sin is None else compiled_kernels.rotary(x, cos, sin, self.backend)

    def attend(self, q: Tensor, batch: TokenBatch, cache: CacheLayer, backend: Backend | None = None) -> Tensor:
        """Attend to everything written so far: [token, head, head_dim]; on the module's backend unless given."""
        parameters = AttentionParameters(self.scale, self.mask, self.spec.softcap, self.sink_logits, self.score)
        return cache.attend(q, batch, parameters, backend or self.backend)

    def o_proj(self, mixed: Tensor) -> Tensor:
        """Project the result of attention back: [token, head, head_dim] -> [token, hidden]."""
        return self.output(rearrange(mixed, "token head dim -> token (head dim)"))


def _normed(heads: Tensor, norm: RMSNorm) -> Tensor:
    rows = rearrange(heads, "token head dim -> (token head) dim")
    return rearrange(norm(rows), "(token head) dim -> token head dim", head=heads.shape[1])


def build_attention(
    spec: AnyAttentionSpec, hidden_size: int, backend: Backend, format: WeightFormat, eps: float, offset: float = 0.0
) -> Attention | MLA:
    """Build the module of one layer's attention: built-in, or custom. Raises WorkbenchError where that cannot be
    built."""
    if isinstance(spec, MLASpec):
        return MLA(spec, hidden_size, backend, format)
    if spec.module is None:
        return Attention(spec, hidden_size, backend, format, eps, offset)
    found, name = load_module(spec.module), f"module {spec.module.path}"
    offsets = (offset,) if offset else ()  # few models have one: only then a module must take it
    return cast(
        Attention, build_custom(found, spec.module.arguments, name, spec, hidden_size, backend, format, eps, *offsets)
    )


def build_custom_attention(
    spec: AttentionSpec,
    hidden_size: int,
    backend: Backend,
    format: WeightFormat,
    eps: float,
    offset: float,
    dtype: torch.dtype,
) -> Attention | MLA:
    """Build a custom module in memory: the random numbers that it draws are the same every time."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        return build_attention(spec, hidden_size, backend, format, eps, offset).to(dtype).requires_grad_(False)


class TransformerBlock(nn.Module):
    """One layer, normed before each part and, with `post_norms`, after it too (Gemma 2). `before_attention` and
    `after_attention` are the two sides of the read from the cache."""

    def __init__(
        self, kind: LayerSpec, hidden_size: int, eps: float, backend: Backend, format: WeightFormat, offset: float = 0.0
    ):
        """Build the block; `offset` is added to the weights of the norms."""
        super().__init__()
        norm = hidden_size, eps, backend, offset
        self.attention_norm = RMSNorm(*norm)
        self.attention = build_attention(kind.attention, hidden_size, backend, format, eps, offset)
        self.feedforward_norm = RMSNorm(*norm)
        self.feedforward = build_feedforward(kind, hidden_size, backend, format)
        self.attention_post_norm = RMSNorm(*norm) if kind.post_norms else nn.Identity()
        self.feedforward_post_norm = RMSNorm(*norm) if kind.post_norms else nn.Identity()

    def forward(self, x: Tensor, cos: Angles, sin: Angles, batch: TokenBatch, cache: CacheLayer) -> Tensor:
        q, k, v = self.before_attention(x, cos, sin)
        cache.write(k, v, batch, self.attention.backend)
        return self.after_attention(x, self.attention.attend(q, batch, cache))

    def before_attention(self, x: Tensor, cos: Angles, sin: Angles) -> tuple[Tensor, Tensor, Tensor]:
        return self.attention.qkv_proj(self.attention_norm(x), cos, sin)

    def after_attention(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Add attention's result [token, head, head_dim] to x [token, hidden] and run the feed-forward: [token,
        hidden]."""
        read = self.attention_post_norm(self.attention.o_proj(mixed))
        x, normed = self.feedforward_norm.add_and_norm(x, read)
        return x + self.feedforward_post_norm(self.feedforward(normed))
