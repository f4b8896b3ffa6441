"""A causal convolution channel by channel, with the last inputs as its state, and LFM2's gated layer of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from compiled_kernels import Backend
from workbench.batch import TokenBatch
from workbench.kv_cache.states import StateLayer
from workbench.model.linear import Linear
from workbench.model.quantized import WeightFormat
from workbench.model.recurrent.spec import ShortConvSpec


class CausalConv(nn.Module):
    """A convolution over the last `kernel` tokens of each channel: y[t] is the sum of weight[j] x[t - kernel + 1 + j].

    It is a sum of `kernel` products element by element, in the inputs' own type: a sequence's result depends on
    nothing but the sequence.
    """

    def __init__(self, channels: int, kernel: int, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, kernel))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    def forward(self, x: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
        """Convolve x [seq, token, channels] after `tail` [seq, channels, kernel - 1], the inputs before it.

        Returns:
            the convolution in the type of the tail, [seq, token, channels], and the new tail.
        """
        weight, count = self.weight.to(tail.dtype), x.shape[1]
        inputs = torch.cat([tail.transpose(1, 2), x.to(tail.dtype)], dim=1)
        y = sum(inputs[:, j : j + count] * weight[:, j] for j in range(weight.shape[1]))
        assert isinstance(y, Tensor)
        return y if self.bias is None else y + self.bias.to(y.dtype), inputs[:, count:].transpose(1, 2)


def rms_norm_rows(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm the last axis of x by its root mean square, in x's own type."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(x.dtype)


class ShortConv(nn.Module):
    """LFM2's layer: y = c * conv(b * x), where b, c, x are projections of the input."""

    def __init__(self, spec: ShortConvSpec, hidden_size: int, backend: Backend, format: WeightFormat):
        super().__init__()
        self.spec, self.backend = spec, backend
        stored = backend, format.blocks, format.activations_of(format.blocks)
        self.input = Linear(hidden_size, 3 * spec.channels, spec.bias, *stored)
        self.conv = CausalConv(spec.channels, spec.kernel, spec.bias)
        self.output = Linear(spec.channels, hidden_size, spec.bias, *stored)

    def mix(self, x: Tensor, batch: TokenBatch, states: StateLayer) -> Tensor:
        """Run the layer up to its output projection, and keep the states: [token, hidden] -> [token, channels]."""
        b, c, x = self.input(x).chunk(3, dim=-1)
        return c * states.scan(b * x, batch, self._step).to(c.dtype)

    def o_proj(self, mixed: Tensor) -> Tensor:
        """Project back: [token, channels] -> [token, hidden]."""
        return self.output(mixed)

    def _step(self, rows: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        y, tail = self.conv(rows, states[0])
        return y, (tail,)
