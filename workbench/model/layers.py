"""The parts of a decoder block. Each is told its lane; none knows which others there are."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn

import compiled_kernels
from compiled_kernels import Lane, masks
from workbench.batch import TokenBatch
from workbench.cache.store import DenseLayer
from workbench.model.quantized import Format, WeightFormat, dequantize
from workbench.model.spec import Attention as AttentionSpec
from workbench.model.spec import LayerKind


class Norm(nn.Module):
    """Root-mean-square norm over `width`."""

    def __init__(self, width: int, eps: float, lane: Lane):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps, self.lane = eps, lane

    def forward(self, x: Tensor) -> Tensor:
        return compiled_kernels.rms_norm(x, self.weight, self.eps, self.lane)

    def after_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """x + residual and its norm."""
        return compiled_kernels.add_rms_norm(x, residual, self.weight, self.eps, self.lane)


class Linear(nn.Module):
    """[token, width] -> [token, out]. The matrix is stored as `format`: dense, int8 or int4 (see quantized.py)."""

    def __init__(self, width: int, out: int, bias: bool, lane: Lane, format: Format = "dense", group: int = 64):
        super().__init__()
        self.width, self.group, self.lane = width, group, lane
        self.format: Format = format
        stored, scales = _storage(width, out, format, group)
        self.weight = nn.Parameter(stored, requires_grad=False)
        self.scales = None if scales is None else nn.Parameter(scales, requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.scales is None:
            return compiled_kernels.linear(x, self.weight, self.bias, self.lane)
        product = compiled_kernels.linear_int8 if self.format == "int8" else compiled_kernels.linear_int4
        return product(x, self.weight, self.scales, self.bias, self.lane)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The matrix, its scales, its bias, as far as there are such."""
        return tuple(part for part in (self.weight, self.scales, self.bias) if part is not None)

    def rows(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the matrix as numbers: [token] -> [token, width]. What a tied embedding looks up."""
        return dequantize(self.weight[index], None if self.scales is None else self.scales[index], dtype)


def _storage(width: int, out: int, format: Format, group: int) -> tuple[Tensor, Tensor | None]:
    if format == "int8":
        return torch.empty(out, width, dtype=torch.int8), torch.empty(out)
    if format == "int4":
        scales = torch.empty(out, width // group, dtype=torch.float16)
        return torch.empty(out, width // 2, dtype=torch.uint8), scales
    return torch.empty(out, width), None


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al., 2023): project and turn, read the cache, project back."""

    def __init__(self, spec: AttentionSpec, width: int, lane: Lane, format: WeightFormat):
        super().__init__()
        self.spec = spec
        self.lane = lane
        self.scale = spec.dim**-0.5
        self.mask = masks.Causal() if spec.window is None else masks.SlidingWindow(spec.window)
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


class GatedFeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)); gate and up are one product."""

    def __init__(self, width: int, hidden: int, bias: bool, lane: Lane, format: WeightFormat):
        super().__init__()
        self.lane = lane
        stored = lane, format.blocks, format.group
        self.gate_up = Linear(width, 2 * hidden, bias, *stored)
        self.down = Linear(hidden, width, bias, *stored)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(compiled_kernels.gated_silu(self.gate_up(x), self.lane))


class Block(nn.Module):
    """One pre-norm layer. `before` and `after` are what lies on either side of the read from the cache."""

    def __init__(self, kind: LayerKind, width: int, eps: float, lane: Lane, format: WeightFormat):
        super().__init__()
        self.attention_norm = Norm(width, eps, lane)
        self.attention = Attention(kind.attention, width, lane, format)
        self.feedforward_norm = Norm(width, eps, lane)
        self.feedforward = GatedFeedForward(width, kind.hidden, kind.feedforward_bias, lane, format)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, batch: TokenBatch, cache: DenseLayer) -> Tensor:
        q, k, v = self.before(x, cos, sin)
        cache.write(k, v, batch, self.attention.lane)
        return self.after(x, self.attention.read(q, batch, cache))

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.attention.project(self.attention_norm(x), cos, sin)

    def after(self, x: Tensor, mixed: Tensor) -> Tensor:
        """x [token, width] and what attention read [token, head, dim] -> the block's output [token, width]."""
        read = self.attention.output(rearrange(mixed, "token head dim -> token (head dim)"))
        x, normed = self.feedforward_norm.after_sum(x, read)
        return x + self.feedforward(normed)
