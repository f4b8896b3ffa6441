"""The parts of a decoder block. Each is told its lane; none knows which others there are."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn

import compiled_kernels
from compiled_kernels import Lane, masks
from workbench.batch import TokenBatch
from workbench.cache.store import DenseLayer
from workbench.model.spec import Attention as AttentionSpec
from workbench.model.spec import LayerKind


class Norm(nn.Module):
    """Root-mean-square norm over `width`."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return compiled_kernels.rms_norm(x, self.weight, self.eps)


class Linear(nn.Module):
    """[token, width] -> [token, out]."""

    def __init__(self, width: int, out: int, bias: bool, lane: Lane):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, width))
        self.bias = nn.Parameter(torch.empty(out)) if bias else None
        self.lane = lane

    def forward(self, x: Tensor) -> Tensor:
        return compiled_kernels.linear(x, self.weight, self.bias, self.lane)


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al., 2023): project and turn, read the cache, project back."""

    def __init__(self, spec: AttentionSpec, width: int, lane: Lane):
        super().__init__()
        self.spec = spec
        self.lane = lane
        self.scale = spec.dim**-0.5
        self.mask = masks.Causal() if spec.window is None else masks.SlidingWindow(spec.window)
        self.qkv = Linear(width, (spec.heads + 2 * spec.groups) * spec.dim, spec.input_bias, lane)
        self.output = Linear(spec.heads * spec.dim, width, spec.output_bias, lane)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [token, width] -> q [token, head, dim], k and v [token, group, dim], q and k turned."""
        heads, groups = self.spec.heads, self.spec.groups
        rows = rearrange(self.qkv(x), "token (head dim) -> token head dim", dim=self.spec.dim)
        q, k, v = rows.split([heads, groups, groups], dim=1)
        return compiled_kernels.rotary(q, cos, sin), compiled_kernels.rotary(k, cos, sin), v

    def read(self, q: Tensor, batch: TokenBatch, cache: DenseLayer) -> Tensor:
        return cache.attend(q, batch, self.scale, self.mask, self.lane)


class GatedFeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)); gate and up are one product."""

    def __init__(self, width: int, hidden: int, bias: bool, lane: Lane):
        super().__init__()
        self.gate_up = Linear(width, 2 * hidden, bias, lane)
        self.down = Linear(hidden, width, bias, lane)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(compiled_kernels.gated_silu(self.gate_up(x)))


class Block(nn.Module):
    """One pre-norm layer. `before` and `after` are what lies on either side of the read from the cache."""

    def __init__(self, kind: LayerKind, width: int, eps: float, lane: Lane):
        super().__init__()
        self.attention_norm = Norm(width, eps)
        self.attention = Attention(kind.attention, width, lane)
        self.feedforward_norm = Norm(width, eps)
        self.feedforward = GatedFeedForward(width, kind.hidden, kind.feedforward_bias, lane)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, batch: TokenBatch, cache: DenseLayer) -> Tensor:
        q, k, v = self.before(x, cos, sin)
        cache.write(k, v, batch)
        return self.after(x, self.attention.read(q, batch, cache))

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.attention.project(self.attention_norm(x), cos, sin)

    def after(self, x: Tensor, mixed: Tensor) -> Tensor:
        """x [token, width] and what attention read [token, head, dim] -> the block's output [token, width]."""
        x = x + self.attention.output(rearrange(mixed, "token head dim -> token (head dim)"))
        return x + self.feedforward(self.feedforward_norm(x))
