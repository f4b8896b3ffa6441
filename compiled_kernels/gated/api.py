"""The gates of feed-forwards: SwiGLU and GeGLU (Shazeer, 2020), and the clamped form of gpt-oss (OpenAI, 2025)."""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor

from compiled_kernels.backends import Backend
from compiled_kernels.gated import reference
from compiled_kernels.operators import Lowered, Operator, define_operator


def _gate(name: str, specification: Callable[..., Tensor], arguments: str = "") -> Operator:
    kernels = {
        Backend.TRITON: f"compiled_kernels.gated.triton:{name}",
        Backend.MLIR: Lowered(specification, lanes=64),  # exponentials as polynomials (see mlir/rewrites.py)
    }
    return define_operator(name, f"(Tensor gate_up{arguments}) -> Tensor", _joined, kernels)


def _joined(gate_up: Tensor, *_: float) -> Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


GATED_SILU = _gate("gated_silu", reference.reference)
GATED_GELU = _gate("gated_gelu", reference.gelu)
GATED_CLAMPED = _gate("gated_clamped", reference.clamped, ", float alpha, float limit")


def gated_silu(gate_up: Float[Tensor, "token two_hidden"], backend: Backend = Backend.EAGER) -> Tensor:
    """Compute silu(gate) * up (SwiGLU), where `gate_up` holds the gate's columns, then the up projection's: [token,
    intermediate]."""
    if backend in (Backend.EAGER, Backend.INDUCTOR):
        return reference.reference(gate_up)
    return GATED_SILU.implementation(backend)(gate_up)


def gated_gelu(gate_up: Float[Tensor, "token two_hidden"], backend: Backend = Backend.EAGER) -> Tensor:
    """Compute gelu(gate) * up with the tanh form of gelu (GeGLU): [token, intermediate]."""
    if backend in (Backend.EAGER, Backend.INDUCTOR):
        return reference.gelu(gate_up)
    return GATED_GELU.implementation(backend)(gate_up)


def gated_clamped(
    gate_up: Float[Tensor, "token two_hidden"], alpha: float, limit: float, backend: Backend = Backend.EAGER
) -> Tensor:
    """Compute g sigmoid(alpha g) (u + 1), g = min(gate, limit) and u = up within ±limit (gpt-oss): [token,
    intermediate]."""
    if backend in (Backend.EAGER, Backend.INDUCTOR):
        return reference.clamped(gate_up, alpha, limit)
    return GATED_CLAMPED.implementation(backend)(gate_up, alpha, limit)
