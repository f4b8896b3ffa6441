"""Feed-forward parts of a block: one gated feed-forward, or a mixture of experts."""

from __future__ import annotations

import torch
from einops import rearrange, repeat
from torch import Tensor, nn

import compiled_kernels
from compiled_kernels import Backend
from compiled_kernels.capabilities import known_gap
from workbench.errors import WorkbenchError
from workbench.model.linear import Linear
from workbench.model.quantized import WeightFormat
from workbench.model.spec import GateSpec, LayerSpec, MoESpec


def build_feedforward(kind: LayerSpec, hidden_size: int, backend: Backend, format: WeightFormat) -> nn.Module:
    """Build the feed-forward that `kind` describes: [token, hidden] -> [token, hidden]."""
    if kind.experts is None:
        return GatedMLP(kind, hidden_size, backend, format)
    return MixtureOfExperts(kind, kind.experts, hidden_size, backend)


def apply_gate(gate_up: Tensor, gate: GateSpec, backend: Backend) -> Tensor:
    """Apply the gate: the gate's columns, then the up projection's, [token, 2 intermediate] -> [token,
    intermediate]."""
    if gate.kind == "silu":
        return compiled_kernels.gated_silu(gate_up, backend)
    if gate.kind == "gelu_tanh":
        return compiled_kernels.gated_gelu(gate_up, backend)
    return compiled_kernels.gated_clamped(gate_up, gate.alpha, gate.limit, backend)


class GatedMLP(nn.Module):
    """A gated feed-forward: down(gate(x) joined with up(x)); gate and up are one product."""

    def __init__(self, kind: LayerSpec, hidden_size: int, backend: Backend, format: WeightFormat):
        super().__init__()
        self.backend, self.gate = backend, kind.gate
        stored = backend, format.blocks, format.quant_group, format.activations_of(format.blocks)
        self.gate_up = Linear(hidden_size, 2 * kind.intermediate_size, kind.mlp_bias, *stored)
        self.down = Linear(kind.intermediate_size, hidden_size, kind.mlp_bias, *stored)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(apply_gate(self.gate_up(x), self.gate, self.backend))


class MixtureOfExperts(nn.Module):
    """A mixture of experts: a router's scores choose the experts of each token and weigh their outputs (Shazeer et
    al., 2017; gpt-oss).

    The router and the experts stay dense, whatever the format of the other matrices.
    """

    def __init__(self, kind: LayerSpec, experts: MoESpec, hidden_size: int, backend: Backend):
        super().__init__()
        if gap := known_gap("expert_linear", backend, ""):
            raise WorkbenchError(f"a mixture of experts has no backend {backend}: {gap.reason}")
        self.backend, self.gate, self.num_experts_per_tok = backend, kind.gate, experts.num_experts_per_tok
        count, hidden, bias = experts.num_experts, kind.intermediate_size, kind.mlp_bias
        self.router = Linear(hidden_size, count, bias, backend)
        self.gate_up = nn.Parameter(torch.empty(count, 2 * hidden, hidden_size))
        self.gate_up_bias = nn.Parameter(torch.empty(count, 2 * hidden)) if bias else None
        self.down = nn.Parameter(torch.empty(count, hidden_size, hidden))
        self.down_bias = nn.Parameter(torch.empty(count, hidden_size)) if bias else None

    @property
    def unread_bytes(self) -> int:
        """Return the bytes that a single token leaves unread: the experts that it does not use."""
        stacks = (self.gate_up, self.gate_up_bias, self.down, self.down_bias)
        return sum(
            each.nbytes // len(each) * (len(each) - self.num_experts_per_tok) for each in stacks if each is not None
        )

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.router(x).topk(self.num_experts_per_tok, dim=-1)
        exact = torch.promote_types(x.dtype, torch.float32)
        weights = torch.softmax(scores.to(exact), dim=-1)
        experts = rearrange(chosen, "token used -> (token used)")
        rows = repeat(x, "token width -> (token used) width", used=self.num_experts_per_tok)
        hidden = compiled_kernels.expert_linear(rows, experts, self.gate_up, self.gate_up_bias, self.backend)
        hidden = apply_gate(hidden, self.gate, self.backend)
        out = compiled_kernels.expert_linear(hidden, experts, self.down, self.down_bias, self.backend)
        out = rearrange(out, "(token used) width -> token used width", used=self.num_experts_per_tok)
        return (out.to(exact) * weights[..., None]).sum(dim=1).to(x.dtype)
