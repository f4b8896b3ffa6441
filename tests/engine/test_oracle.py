"""The oracle and the engine's own gate lose no digits that they need not lose: what both lose no test of rows sees, and
what one loses looks like an error of the other's."""

from __future__ import annotations

from decimal import Decimal, localcontext
from math import pi

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from compiled_kernels import Backend
from workbench.model.feedforward import apply_gate
from workbench.model.spec import ActivationSpec
from workbench.oracle import naive


def sigmoid(z: Decimal) -> Decimal:
    return 1 / (1 + (-z).exp())


def published(gate: ActivationSpec, x: float) -> tuple[Decimal, Decimal]:
    """Return the output of `gate` for x beside an up of 1, with 60 digits, and the argument of its exponential."""
    wide, limit = Decimal(x), Decimal(gate.limit)
    if gate.kind == "clamped":  # up + 1 is 2, or less where the limit is
        wide = min(wide, limit)
        z = Decimal(gate.alpha) * wide
        return wide * sigmoid(z) * (min(Decimal(1), limit) + 1), z
    z = wide if gate.kind == "silu" else 2 * (2 / Decimal(pi)).sqrt() * (wide + Decimal("0.044715") * wide**3)
    return wide * sigmoid(z), z


def of_the_oracle(x: Tensor, gate: ActivationSpec) -> Tensor:
    return naive._gated(x, torch.ones_like(x), gate)


def of_the_engine(x: Tensor, gate: ActivationSpec) -> Tensor:
    return apply_gate(torch.stack([x, torch.ones_like(x)], dim=-1), gate, Backend.EAGER)[:, 0]


@pytest.mark.parametrize("computed", [of_the_oracle, of_the_engine])
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "clamped"])
def test_a_gate_keeps_its_digits_far_below_zero(kind: str, computed) -> None:
    """A relative error of eps for each operation, and for each unit of the exponential's argument: x / 2 (1 + tanh z),
    which is how torch computes GELU, has 1e-12 at -4 where this is 1e-14, and 1e-7 at -6."""
    gate = ActivationSpec(kind=kind, alpha=1.3, limit=0.5)  # type: ignore[arg-type]

    @given(st.floats(-6, 6).filter(lambda x: abs(x) > 1e-3))
    @example(-6.0)
    def keeps(x: float) -> None:
        with localcontext(prec=60):
            exact, z = published(gate, x)
            found = Decimal(computed(torch.tensor([x], dtype=torch.float64), gate).item())
            assert abs(found - exact) <= Decimal(torch.finfo(torch.float64).eps) * (4 + abs(z)) * abs(exact)

    keeps()
