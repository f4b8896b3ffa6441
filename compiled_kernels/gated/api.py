"""Compute the gates of feed-forward layers: SwiGLU and GeGLU (Shazeer, 2020), and gpt-oss's clamped form (2025)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from compiled_kernels.backends import Backend
from compiled_kernels.operators import Lowered, Operator, define_operator


def gated_silu_reference(gate_up: Tensor) -> Tensor:
    gate, up = _halves(gate_up)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


def gated_gelu_reference(gate_up: Tensor) -> Tensor:
    gate, up = _halves(gate_up)
    # (1 + tanh z) / 2 is the sigmoid of 2 z.
    twice = math.sqrt(8 / math.pi) * (gate + 0.044715 * gate * gate * gate)
    return (gate * torch.sigmoid(twice) * up).to(gate_up.dtype)


def gated_clamped_reference(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    gate, up = _halves(gate_up)
    gate, up = torch.where(gate > limit, limit, gate), torch.where(up.abs() > limit, limit * up.sign(), up)
    return (gate * torch.sigmoid(alpha * gate) * (up + 1)).to(gate_up.dtype)


def _halves(gate_up: Tensor) -> tuple[Tensor, ...]:
    """Return gate and up, in float32 or wider."""
    return gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, dim=-1)


def _gate(name: str, specification: Callable[..., Tensor], arguments: str = "") -> Operator:
    kernels = {
        Backend.TRITON: f"compiled_kernels.gated.triton:{name}",
        Backend.MLIR: Lowered(specification, lanes=64),  # exponentials as polynomials (see mlir/rewrites.py)
    }
    return define_operator(name, f"(Tensor gate_up{arguments}) -> Tensor", _joined, kernels)


def _joined(gate_up: Tensor, *_: float) -> Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


GATED_SILU = _gate("gated_silu", gated_silu_reference)
GATED_GELU = _gate("gated_gelu", gated_gelu_reference)
GATED_CLAMPED = _gate("gated_clamped", gated_clamped_reference, ", float alpha, float limit")


def gated_silu(gate_up: Float[Tensor, "token two_hidden"], backend: Backend = Backend.EAGER) -> Tensor:
    """Compute silu(gate) * up (SwiGLU); `gate_up` has the gate's columns, then the up projection's: [token,
    intermediate].
    """
    if backend in (Backend.EAGER, Backend.INDUCTOR):
        return gated_silu_reference(gate_up)
    return GATED_SILU.implementation(backend)(gate_up)


def gated_gelu(gate_up: Float[Tensor, "token two_hidden"], backend: Backend = Backend.EAGER) -> Tensor:
    """Compute gelu(gate) * up with the tanh form of gelu (GeGLU): [token, intermediate]."""
    if backend in (Backend.EAGER, Backend.INDUCTOR):
        return gated_gelu_reference(gate_up)
    return GATED_GELU.implementation(backend)(gate_up)


def gated_clamped(
    gate_up: Float[Tensor, "token two_hidden"], alpha: float, limit: float, backend: Backend = Backend.EAGER
) -> Tensor:
    """Compute g sigmoid(alpha g) (u + 1), g = min(gate, limit) and u = up within ±limit (gpt-oss): [token,
    intermediate]."""
    if backend in (Backend.EAGER, Backend.INDUCTOR):
        return gated_clamped_reference(gate_up, alpha, limit)
    return GATED_CLAMPED.implementation(backend)(gate_up, alpha, limit)
