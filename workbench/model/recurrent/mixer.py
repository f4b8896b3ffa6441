"""Run a recurrent layer: a projection, a causal convolution (whose last inputs are part of the state), and the scan
over the cached state.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from compiled_kernels import Backend
from workbench.batch import TokenBatch
from workbench.kv_cache.layer import CacheLayer, States
from workbench.model.linear import Linear
from workbench.model.mixer import Mixer
from workbench.model.quantized import WeightFormat
from workbench.model.recurrent.spec import DeltaNetSpec, Mamba2Spec, ShortConvSpec

Spec = TypeVar("Spec", ShortConvSpec, DeltaNetSpec, Mamba2Spec)


class CausalConv(nn.Module):
    """A convolution of each channel over its last `kernel` tokens: y[t] is the sum of weight[j] x[t - kernel + 1 + j].

    It is a sum of `kernel` element-wise products in the inputs' own type, so a sequence's result does not depend on the
    batch.
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


class RecurrentMixer(Mixer, Generic[Spec]):
    """A recurrent layer over rows [token, columns], which `project` computes together with an output gate."""

    def __init__(
        self, spec: Spec, hidden_size: int, backend: Backend, format: WeightFormat,
        biases: tuple[bool, bool, bool] = (False, False, False),
    ):  # fmt: skip
        """Build the module; `biases` are those of the input projection, the convolution and the output projection."""
        super().__init__()
        self.spec, self.backend = spec, backend
        stored = backend, format.blocks, format.activations
        self.input = Linear(hidden_size, spec.input_columns, biases[0], *stored)
        self.conv = CausalConv(spec.channels, spec.kernel, biases[1])
        self.output = Linear(spec.o_proj_inputs, hidden_size, biases[2], *stored)

    def write_and_read(
        self, projected: tuple[Tensor, ...], batch: TokenBatch, cache: CacheLayer, backend: Backend | None = None
    ) -> Tensor:
        rows, gate = projected
        return self.gated(cache.scan(rows, batch, self.step), gate).to(gate.dtype)

    def step(self, rows: Tensor, states: States) -> tuple[Tensor, States]:
        """Run the recurrence over rows [seq, token, columns], from the states of their sequences; return outputs and
        new states.
        """
        raise NotImplementedError

    def gated(self, y: Tensor, gate: Tensor) -> Tensor:
        """Apply the output gate to outputs [token, columns]."""
        raise NotImplementedError

    def o_proj(self, mixed: Tensor) -> Tensor:
        return self.output(mixed)


def rms_norm_rows(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize the last axis of x by its root mean square, in x's own type."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(x.dtype)
