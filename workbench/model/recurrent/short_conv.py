"""Compute LFM2's gated layer with a causal convolution of each channel."""

from __future__ import annotations

from torch import Tensor

from compiled_kernels import Backend
from workbench.kv_cache.layer import States
from workbench.model.mixer import Angles
from workbench.model.quantized import WeightFormat
from workbench.model.recurrent.mixer import RecurrentMixer
from workbench.model.recurrent.spec import ShortConvSpec


class ShortConv(RecurrentMixer[ShortConvSpec]):
    """The recurrent layer of LFM2: y = c * conv(b * x), where b, c, x are projections of the input."""

    def __init__(self, spec: ShortConvSpec, hidden_size: int, backend: Backend, format: WeightFormat):
        super().__init__(spec, hidden_size, backend, format, (spec.bias, spec.bias, spec.bias))

    def project(self, x: Tensor, cos: Angles, sin: Angles) -> tuple[Tensor, ...]:
        b, c, x = self.input(x).chunk(3, dim=-1)
        return b * x, c

    def gated(self, y: Tensor, gate: Tensor) -> Tensor:
        return gate * y.to(gate.dtype)

    def step(self, rows: Tensor, states: States) -> tuple[Tensor, States]:
        y, tail = self.conv(rows, states[0])
        return y, (tail,)
