"""The gate of a SwiGLU feed-forward (Shazeer, 2020)."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from compiled_kernels.gated.reference import reference
from compiled_kernels.lanes import Lane
from compiled_kernels.operators import define

GATED_SILU = define(
    "gated_silu",
    "(Tensor gate_up) -> Tensor",
    lambda gate_up: gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2),
    {Lane.TRITON: "compiled_kernels.gated.triton:gated_silu", Lane.MLIR: "compiled_kernels.gated.mlir:gated_silu"},
)


def gated_silu(gate_up: Float[Tensor, "token two_hidden"], lane: Lane = Lane.EAGER) -> Tensor:
    """silu(gate) * up, where `gate_up` holds the gate's columns, then the up projection's: [token, hidden]."""
    if lane in (Lane.EAGER, Lane.INDUCTOR):
        return reference(gate_up)
    return GATED_SILU.form(lane)(gate_up)
