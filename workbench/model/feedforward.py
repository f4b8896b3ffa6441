"""Feed-forward parts of a block: one gated feed-forward, or a mixture of experts."""

from __future__ import annotations

import torch
from einops import rearrange, repeat
from torch import Tensor, nn

import compiled_kernels
from compiled_kernels import Lane
from compiled_kernels.gaps import known_gap
from workbench.errors import WorkbenchError
from workbench.model.parts import Linear
from workbench.model.quantized import WeightFormat
from workbench.model.spec import Experts, Gate, LayerKind


def feedforward(kind: LayerKind, width: int, lane: Lane, format: WeightFormat) -> nn.Module:
    """Build the feed-forward that `kind` describes: [token, hidden] -> [token, hidden]."""
    if kind.experts is None:
        return GatedFeedForward(kind, width, lane, format)
    return MixtureOfExperts(kind, kind.experts, width, lane)


def gated(gate_up: Tensor, gate: Gate, lane: Lane) -> Tensor:
    """Apply the gate: the gate's columns, then the up projection's, [token, 2 intermediate] -> [token,
    intermediate]."""
    if gate.kind == "silu":
        return compiled_kernels.gated_silu(gate_up, lane)
    if gate.kind == "gelu_tanh":
        return compiled_kernels.gated_gelu(gate_up, lane)
    return compiled_kernels.gated_clamped(gate_up, gate.alpha, gate.limit, lane)


class GatedFeedForward(nn.Module):
    """A gated feed-forward: down(gate(x) joined with up(x)); gate and up are one product."""

    def __init__(self, kind: LayerKind, width: int, lane: Lane, format: WeightFormat):
        super().__init__()
        self.lane, self.gate = lane, kind.gate
        stored = lane, format.blocks, format.group, format.activations_of(format.blocks)
        self.gate_up = Linear(width, 2 * kind.hidden, kind.feedforward_bias, *stored)
        self.down = Linear(kind.hidden, width, kind.feedforward_bias, *stored)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(gated(self.gate_up(x), self.gate, self.lane))


class MixtureOfExperts(nn.Module):
    """A mixture of experts: a router's scores choose the experts of each token and weigh their outputs (Shazeer et
    al., 2017; gpt-oss).

    The router and the experts stay dense, whatever the format of the other matrices.
    """

    def __init__(self, kind: LayerKind, experts: Experts, width: int, lane: Lane):
        super().__init__()
        if gap := known_gap("expert_linear", lane, ""):
            raise WorkbenchError(f"a mixture of experts has no lane {lane}: {gap.reason}")
        self.lane, self.gate, self.used = lane, kind.gate, experts.used
        count, hidden, bias = experts.count, kind.hidden, kind.feedforward_bias
        self.router = Linear(width, count, bias, lane)
        self.gate_up = nn.Parameter(torch.empty(count, 2 * hidden, width))
        self.gate_up_bias = nn.Parameter(torch.empty(count, 2 * hidden)) if bias else None
        self.down = nn.Parameter(torch.empty(count, width, hidden))
        self.down_bias = nn.Parameter(torch.empty(count, width)) if bias else None

    @property
    def unread_bytes(self) -> int:
        """Return the bytes that a single token leaves unread: the experts that it does not use."""
        stacks = (self.gate_up, self.gate_up_bias, self.down, self.down_bias)
        return sum(each.nbytes // len(each) * (len(each) - self.used) for each in stacks if each is not None)

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.router(x).topk(self.used, dim=-1)
        exact = torch.promote_types(x.dtype, torch.float32)
        weights = torch.softmax(scores.to(exact), dim=-1)
        experts = rearrange(chosen, "token used -> (token used)")
        rows = repeat(x, "token width -> (token used) width", used=self.used)
        hidden = compiled_kernels.expert_linear(rows, experts, self.gate_up, self.gate_up_bias, self.lane)
        hidden = gated(hidden, self.gate, self.lane)
        out = compiled_kernels.expert_linear(hidden, experts, self.down, self.down_bias, self.lane)
        out = rearrange(out, "(token used) width -> token used width", used=self.used)
        return (out.to(exact) * weights[..., None]).sum(dim=1).to(x.dtype)
