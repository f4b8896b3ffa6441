"""The parts of a decoder block. Each is told its lane; none knows which others there are."""

from __future__ import annotations

from einops import rearrange
from torch import Tensor, nn

import compiled_kernels
from compiled_kernels import Lane, masks
from workbench.batch import TokenBatch
from workbench.cache.store import DenseLayer
from workbench.model.feedforward import feedforward
from workbench.model.latent import LatentAttention
from workbench.model.latent_spec import LatentAttention as LatentSpec
from workbench.model.parts import Linear, Norm
from workbench.model.quantized import WeightFormat
from workbench.model.spec import AnyAttention, LayerKind
from workbench.model.spec import Attention as AttentionSpec


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al., 2023): project and turn, read the cache, project back."""

    def __init__(self, spec: AttentionSpec, width: int, lane: Lane, format: WeightFormat):
        super().__init__()
        self.spec = spec
        self.lane = lane
        self.scale = spec.dim**-0.5 if spec.scale is None else spec.scale
        self.mask = masks.Causal() if spec.window is None else masks.SlidingWindow(spec.window, spec.sinks)
        stored = lane, format.blocks, format.group
        self.qkv = Linear(width, (spec.heads + 2 * spec.groups) * spec.dim, spec.input_bias, *stored)
        self.output = Linear(spec.heads * spec.dim, width, spec.output_bias, *stored)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [token, width] -> q [token, head, dim], k and v [token, group, dim], q and k turned."""
        heads, groups = self.spec.heads, self.spec.groups
        rows = rearrange(self.qkv(x), "token (head dim) -> token head dim", dim=self.spec.dim)
        q, k, v = rows.split([heads, groups, groups], dim=1)
        return self.turn(q, cos, sin), self.turn(k, cos, sin), v

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return compiled_kernels.rotary(x, cos, sin, self.lane)

    def read(self, q: Tensor, batch: TokenBatch, cache: DenseLayer) -> Tensor:
        return cache.attend(q, batch, self.scale, self.mask, self.lane)

    def close(self, mixed: Tensor) -> Tensor:
        """[token, head, dim] -> [token, width]."""
        return self.output(rearrange(mixed, "token head dim -> token (head dim)"))


def attention_of(spec: AnyAttention, width: int, lane: Lane, format: WeightFormat) -> Attention | LatentAttention:
    """The module of one layer's attention."""
    if isinstance(spec, LatentSpec):
        return LatentAttention(spec, width, lane, format)
    return Attention(spec, width, lane, format)


class Block(nn.Module):
    """One layer, normed before each part and, with `post_norms`, after it too (Gemma 2). `before` and `after` are what
    lies on either side of the read from the cache."""

    def __init__(self, kind: LayerKind, width: int, eps: float, lane: Lane, format: WeightFormat, offset: float = 0.0):
        """`offset` is added to the weights of the norms."""
        super().__init__()
        self.built_as = kind, width, eps, lane, format, offset
        norm = width, eps, lane, offset
        self.attention_norm = Norm(*norm)
        self.attention = attention_of(kind.attention, width, lane, format)
        self.feedforward_norm = Norm(*norm)
        self.feedforward = feedforward(kind, width, lane, format)
        self.attention_post_norm = Norm(*norm) if kind.post_norms else nn.Identity()
        self.feedforward_post_norm = Norm(*norm) if kind.post_norms else nn.Identity()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, batch: TokenBatch, cache: DenseLayer) -> Tensor:
        q, k, v = self.before(x, cos, sin)
        cache.write(k, v, batch, self.attention.lane)
        return self.after(x, self.attention.read(q, batch, cache))

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.attention.project(self.attention_norm(x), cos, sin)

    def after(self, x: Tensor, mixed: Tensor) -> Tensor:
        """x [token, width] and what attention read [token, head, dim] -> the block's output [token, width]."""
        read = self.attention_post_norm(self.attention.close(mixed))
        x, normed = self.feedforward_norm.after_sum(x, read)
        return x + self.feedforward_post_norm(self.feedforward(normed))
