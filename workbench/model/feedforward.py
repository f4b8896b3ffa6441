"""Build the feed-forward part of a block: one gated feed-forward, or a mixture of experts."""

from __future__ import annotations

from functools import partial
from statistics import NormalDist

import torch
from einops import rearrange, repeat
from torch import Tensor, nn

import compiled_kernels
from compiled_kernels import Backend
from compiled_kernels.blocked import in_panels
from compiled_kernels.expert_linear.stacks import (
    Stack,
    of_expert,
    stack_from_panels,
    stack_panels_problem,
    stack_to_panels,
)
from compiled_kernels.linear.matrix_format import MatrixFormat
from compiled_kernels.linear.quantize import dequantize_matrix
from workbench.errors import WorkbenchError
from workbench.model.linear import Linear
from workbench.model.quantized import BESIDE, WeightFormat
from workbench.model.spec import ActivationSpec, LayerSpec, MoESpec


def build_feedforward(kind: LayerSpec, hidden_size: int, backend: Backend, format: WeightFormat) -> nn.Module:
    """Build the feed-forward of a layer, a module [token, hidden] -> [token, hidden]; Identity if the layer has
    none.
    """
    if not kind.intermediate_size:
        return nn.Identity()
    if kind.experts is not None:
        return MixtureOfExperts(kind, kind.experts, hidden_size, backend, format)
    build = GatedMLP if kind.activation.gated else PlainMLP
    return build(kind.activation, hidden_size, kind.intermediate_size, kind.mlp_bias, backend, format)


def apply_gate(gate_up: Tensor, activation: ActivationSpec, backend: Backend) -> Tensor:
    """Apply a gated activation to `gate_up`, the gate's columns and then the up projection's: [token, 2 intermediate]
    -> [token, intermediate]."""
    if activation.gate_scale != 1 or activation.sparsity:
        gate, up = gate_up.chunk(2, dim=-1)
        return activate(_sparse(gate * activation.gate_scale, activation.sparsity), activation) * up
    if activation.kind == "silu":
        return compiled_kernels.gated_silu(gate_up, backend)
    if activation.kind == "gelu_tanh":
        return compiled_kernels.gated_gelu(gate_up, backend)
    if activation.kind == "clamped":
        return compiled_kernels.gated_clamped(gate_up, activation.alpha, activation.limit, backend)
    gate, up = gate_up.chunk(2, dim=-1)
    return activate(gate, activation) * up


def _sparse(gate: Tensor, share: float) -> Tensor:
    """Subtract from each row of gates the quantile `share` of a normal distribution with the row's mean and
    deviation, and clamp at 0.
    """
    if not share:
        return gate
    above = gate - gate.mean(-1, keepdim=True)
    return nn.functional.relu(above - NormalDist().inv_cdf(share) * gate.std(-1, keepdim=True, unbiased=False))


def activate(x: Tensor, activation: ActivationSpec) -> Tensor:
    """Apply an activation element by element, in float32."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if activation.kind == "silu":
        wide = nn.functional.silu(wide)
    elif activation.kind == "gelu":
        wide = nn.functional.gelu(wide)
    elif activation.kind == "gelu_tanh":
        wide = nn.functional.gelu(wide, approximate="tanh")
    else:
        wide = nn.functional.relu(wide)
        wide = wide * wide if activation.kind == "relu2" else wide
    return wide.to(x.dtype)


class GatedMLP(nn.Module):
    """A gated feed-forward, down(f(gate(x)) * up(x)); gate and up are computed as one product."""

    def __init__(
        self, activation: ActivationSpec, hidden_size: int, width: int, bias: bool, backend: Backend,
        format: WeightFormat,
    ):  # fmt: skip
        super().__init__()
        self.backend, self.activation = backend, activation
        stored = backend, format.blocks, format.activations
        self.gate_up = Linear(hidden_size, 2 * width, bias, *stored)
        self.down = Linear(width, hidden_size, bias, *stored)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(apply_gate(self.gate_up(x), self.activation, self.backend))


class XIELU(nn.Module):
    """An activation with four learned numbers: a parabola above 0, an exponential below (Huang and Schlag, 2024)."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p, self.alpha_n = nn.Parameter(torch.empty(1)), nn.Parameter(torch.empty(1))
        self.beta, self.eps = nn.Parameter(torch.empty(())), nn.Parameter(torch.empty(()))

    def forward(self, x: Tensor) -> Tensor:
        exact = torch.promote_types(x.dtype, torch.float32)
        wide, (alpha_p, alpha_n, beta, eps) = x.to(exact), (part.to(exact) for part in self.parameters())
        above = nn.functional.softplus(alpha_p) * wide * wide
        below = (beta + nn.functional.softplus(alpha_n)) * (torch.expm1(torch.minimum(wide, eps)) - wide)
        return (torch.where(wide > 0, above, below) + beta * wide).to(x.dtype)


class PlainMLP(nn.Module):
    """A feed-forward without a gate, down(f(up(x))) (GPT-2)."""

    def __init__(
        self, activation: ActivationSpec, hidden_size: int, width: int, bias: bool, backend: Backend,
        format: WeightFormat,
    ):  # fmt: skip
        super().__init__()
        self.activation = XIELU() if activation.kind == "xielu" else partial(activate, activation=activation)
        stored = backend, format.blocks, format.activations
        self.up = Linear(hidden_size, width, bias, *stored)
        self.down = Linear(width, hidden_size, bias, *stored)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


class Router(Linear):
    """Choose the experts of each token and their weights (see `RouterSpec`); its matrix stays dense."""

    def __init__(self, experts: MoESpec, hidden_size: int, backend: Backend):
        super().__init__(hidden_size, experts.num_experts, experts.router_bias, backend)
        self.spec, self.num_experts, self.num_chosen = experts.router, experts.num_experts, experts.num_experts_per_tok
        biased = experts.router.selection_bias
        self.selection_bias = nn.Parameter(torch.empty(experts.num_experts)) if biased else None

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights and numbers of the experts chosen for x [token, hidden]: both [token, chosen]."""
        logits = self(x)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.spec.score == "sparsemixer":
            return self._mix(logits)
        scores = logits
        if self.spec.score == "softmax":
            scores = torch.softmax(logits, dim=-1)
        elif self.spec.score == "sigmoid":
            scores = torch.sigmoid(logits)
        ranked = scores if self.selection_bias is None else scores + self.selection_bias.to(scores.dtype)
        if self.spec.groups > 1:
            ranked = self._within_groups(ranked)
        chosen = ranked.topk(self.num_chosen, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if self.spec.softmax_chosen:
            weights = torch.softmax(weights, dim=-1)
        if self.spec.renormalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * self.spec.factor, chosen

    def _mix(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Choose experts one by one (SparseMixer, Liu et al., 2023): logits [token, expert] -> weights and experts,
        each [token, chosen].
        """
        left, weights, chosen = logits, [], []
        for _ in range(self.num_chosen):
            best, number = left.max(dim=-1, keepdim=True)
            far = (best - logits) / torch.maximum(logits.abs(), best) > 2 * self.spec.jitter
            weights.append(left.masked_fill(far, -torch.inf).softmax(-1).gather(-1, number))
            chosen.append(number)
            left = left.scatter(-1, number, -torch.inf)
        return torch.cat(weights, dim=-1) * self.spec.factor, torch.cat(chosen, dim=-1)

    def _within_groups(self, ranked: Tensor) -> Tensor:
        """Mask all experts outside of the best groups: ranked [token, expert]."""
        grouped = rearrange(ranked, "token (group expert) -> token group expert", group=self.spec.groups)
        best = grouped.amax(-1) if self.spec.group_score == "max" else grouped.topk(2, dim=-1).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool)
        kept.scatter_(-1, best.topk(self.spec.kept_groups, dim=-1).indices, True)
        left = grouped.masked_fill(~kept[..., None], -torch.inf)
        return rearrange(left, "token group expert -> token (group expert)")


STACKS = ("gate_up", "down")


class MixtureOfExperts(nn.Module):
    """A mixture of experts: a router chooses the experts of each token and weighs them (Shazeer et al., 2017).

    The router stays dense. The experts' matrices are two stacks, dense or quantized (see
    compiled_kernels/expert_linear/stacks.py); `formats` has the format of each.
    """

    chosen: Tensor | None
    gate_up: Tensor
    down: Tensor

    def __init__(self, kind: LayerSpec, experts: MoESpec, hidden_size: int, backend: Backend, format: WeightFormat):
        super().__init__()
        self.backend, self.activation, self.num_experts_per_tok = backend, kind.activation, experts.num_experts_per_tok
        self.held = None if experts.held is None else experts.held_experts
        count, hidden, bias = len(experts.held_experts), kind.intermediate_size, kind.mlp_bias
        if not kind.activation.gated:
            raise WorkbenchError("experts without a gate are not supported")
        self.router, self.weighs_input = Router(experts, hidden_size, backend), experts.router.weighs_input
        self.formats: dict[str, MatrixFormat] = {}
        self.sizes = {"gate_up": (count, 2 * hidden, hidden_size), "down": (count, hidden_size, hidden)}
        for name in STACKS:
            self.store_as(name, format.of_experts)
        self.gate_up_bias = nn.Parameter(torch.empty(count, 2 * hidden)) if bias else None
        self.down_bias = nn.Parameter(torch.empty(count, hidden_size)) if bias else None
        self.register_buffer("chosen", None, persistent=False)  # [row, expert's place], where it is recorded
        self.shared = self.shared_gate = None
        if width := experts.shared_intermediate_size:
            self.shared = GatedMLP(kind.activation, hidden_size, width, False, backend, format)
            self.shared_gate = Linear(hidden_size, 1, False, backend) if experts.shared_gate else None

    def use_panels(self, panels: bool) -> None:
        """Convert the experts' matrices to panels, if their size allows that, or back to rows."""
        for name in STACKS:
            stack = weight, *_ = self.stack(name)
            if in_panels(weight) and not panels:
                found = stack_from_panels(*stack)
            elif panels and not in_panels(weight) and stack_panels_problem(self.formats[name], weight) is None:
                found = stack_to_panels(*stack)
            else:
                continue
            self._set(name, found)

    def stack(self, name: str) -> Stack:
        """Return the matrices of all experts as one stack, with scales and minima; `name` is `gate_up` or `down`."""
        scales, minima = (getattr(self, f"{name}_{part}") for part in BESIDE)
        return getattr(self, name), scales, minima

    def store_as(self, name: str, format: MatrixFormat) -> None:
        """Allocate all experts' matrices `name`, `gate_up` or `down`, in this format; their values are set later."""
        experts, out, columns = self.sizes[name]
        dense = {"weight": ((out, columns), torch.get_default_dtype())}
        storage = dense if format.is_dense else format.storage(out, columns)
        parts = {part: torch.empty(experts, *shape, dtype=dtype) for part, (shape, dtype) in storage.items()}
        self.formats[name] = format
        self._set(name, tuple(parts.get(part) for part in ("weight", *BESIDE)))

    def _set(self, name: str, tensors: tuple[Tensor | None, ...]) -> None:
        for end, tensor in zip(("", *(f"_{part}" for part in BESIDE)), tensors, strict=True):
            self.register_parameter(name + end, None if tensor is None else nn.Parameter(tensor, requires_grad=False))

    def matrix(self, name: str, expert: int) -> Tensor:
        """Return an expert's dense matrix [out, width], in float32 if it is stored quantized."""
        weight, scales, minima = of_expert(self.stack(name), expert)
        return weight if scales is None else dequantize_matrix(self.formats[name], weight, scales, minima)

    @property
    def unread_bytes(self) -> int:
        """Return the number of bytes that a single token does not read: the weights of local experts that it does not
        use.
        """
        here = range(self.router.num_experts) if self.held is None else self.held
        used = -(-self.num_experts_per_tok * len(here) // self.router.num_experts)
        stacks = [*self.stacks, self.gate_up_bias, self.down_bias]
        return sum(each.nbytes // len(each) * (len(here) - used) for each in stacks if each is not None)

    @property
    def stacks(self) -> list[Tensor]:
        """Return the experts' matrices, and their scales if they have any."""
        return [each for name in STACKS for each in self.stack(name) if each is not None]

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router.choose(x)
        if self.chosen is not None:  # see expert_use.py
            self.chosen[: len(x)].copy_(chosen)
        experts = rearrange(chosen, "token used -> (token used)")
        rows = repeat(x, "token width -> (token used) width", used=self.num_experts_per_tok)
        if self.weighs_input:
            rows = (rows * rearrange(weights, "token used -> (token used) 1")).to(x.dtype)
        out = self._products(rows, experts) if self.held is None else self._held_products(rows, experts, self.held)
        out = rearrange(out, "(token used) width -> token used width", used=self.num_experts_per_tok).to(weights.dtype)
        total = out.sum(dim=1) if self.weighs_input else torch.bmm(weights[:, None], out)[:, 0]
        if self.shared is not None:
            always = self.shared(x).to(total.dtype)
            gate = None if self.shared_gate is None else torch.sigmoid(self.shared_gate(x).to(total.dtype))
            total = total + (always if gate is None else gate * always)
        return total.to(x.dtype)

    def _products(self, rows: Tensor, experts: Tensor) -> Tensor:
        """Return the output of each row's expert: [row, hidden] -> [row, hidden]."""
        hidden = self.multiply("gate_up", rows, experts)
        return self.multiply("down", apply_gate(hidden, self.activation, self.backend), experts)

    def multiply(self, name: str, rows: Tensor, experts: Tensor) -> Tensor:
        """Multiply each row by its expert's matrix from the stack `name`."""
        (weight, scales, minima), bias = self.stack(name), getattr(self, f"{name}_bias")
        stored = weight, bias, scales, minima, self.formats[name].codes
        return compiled_kernels.expert_linear(rows, experts, *stored, self.backend)

    def _held_products(self, rows: Tensor, experts: Tensor, held: range) -> Tensor:
        """Return the products of the experts of this rank, and zeros for rows of the others."""
        out = rows.new_zeros(rows.shape)
        mine = ((experts >= held.start) & (experts < held.stop)).nonzero()[:, 0]
        if len(mine):
            out[mine] = self._products(rows[mine], experts[mine] - held.start)
        return out
