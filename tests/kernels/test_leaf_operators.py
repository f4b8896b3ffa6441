"""The backend mlir's leaf operators against their specification; unwritten memory is NaN."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import compiled_kernels
from compiled_kernels import Backend
from compiled_kernels.cases import case_of, suite_of
from compiled_kernels.mlir import compile_function, stages
from compiled_kernels.mlir.leaf import enclosing_shape, leaf_operator
from compiled_kernels.mlir.lower import lower
from tests.helpers.kernels import kernel_problem, needs_mlir
from tests.kernels.kernel_rows import KERNELS
from tests.thorough import run_seed, tries

pytestmark = needs_mlir
OPERATORS = ("rms_norm", "add_rms_norm", "gated_silu", "gated_gelu", "gated_clamped", "rotary", "log_softmax")


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """torch.empty gives NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("operator", OPERATORS)
def test_float64_equals_float64(operator: str) -> None:
    """The other types are `test_agreement.py`'s."""
    row = next(KERNELS[operator].rows()) | ({} if operator == "log_softmax" else {"dtype": torch.float64})
    assert kernel_problem(operator, Backend.MLIR, row, run_seed()) is None


def test_masked_logits_stay_masked() -> None:
    logits = torch.randn(3, 200)
    logits[:, 50:150] = -torch.inf
    out = compiled_kernels.log_softmax(logits, Backend.MLIR)
    assert (out[:, 50:150] == -torch.inf).all()
    torch.testing.assert_close(out.exp().sum(-1), torch.ones(3))


def test_gates_far_from_zero_are_shut_or_open() -> None:
    gate = torch.tensor([-1e30, -200.0, -100.0, -89.0, -88.0, -87.0, -20.0, 88.0, 100.0, 1e30] * 16)
    gate_up = torch.cat([gate, torch.ones(160)]).repeat(3, 1)
    ours = compiled_kernels.gated_silu(gate_up, Backend.MLIR)
    torch.testing.assert_close(ours, compiled_kernels.gated_silu(gate_up), rtol=1e-6, atol=1e-35)


SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 88.5, 88.73, 89.5, -86.0, -87.0, -87.4, -104.0, 1e-30, 3e38, -3e38]


@settings(max_examples=tries(60))
@given(st.floats(-110, 95, width=32), st.floats(width=32), st.sampled_from([1e-7, 1e-3, 1.0]))
def test_the_polynomial_is_the_exponential(centre: float, any_number: float, spread: float) -> None:
    near = centre + spread * torch.linspace(-20, 20, 4096 - len(SPECIAL) - 1)
    x = torch.cat([torch.tensor([*SPECIAL, any_number]), near])
    kernel = compile_function(torch.exp, (x,), "exp", recipe={"function": "torch.exp"})
    out = torch.empty_like(x)
    kernel.function(2)(x.data_ptr(), out.data_ptr())
    exact = x.double().exp()
    exact = torch.where(exact > torch.finfo(torch.float32).max, torch.inf, exact)
    assert torch.equal(out.isnan(), x.isnan())
    assert torch.equal(out.isinf(), exact.float().isinf())
    usual = exact.isfinite()
    off = (out.double() - exact).abs()[usual]
    assert (off <= 2 * torch.finfo(torch.float32).eps * exact[usual] + 3e-38).all(), float((off / exact[usual]).max())


@settings(max_examples=tries(60))
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=4))
def test_leading_slices_are_known_by_their_strides(axes: list[tuple[int, int]]) -> None:
    stored = [extent + more for extent, more in axes]
    stored[0] = axes[0][0]  # rows beyond the last have no requirement
    part = torch.arange(math.prod(stored)).view(stored)
    for axis, (extent, _) in enumerate(axes):
        part = part.narrow(axis, 0, extent)
    wide = enclosing_shape(part.shape, part.stride())
    if wide is None:  # only where a row is not a whole number of the wider rows inside it
        assert any(more for _, more in axes[1:])
        return
    offsets = sum(
        torch.arange(extent).view(-1, *[1] * (len(axes) - axis - 1)) * stride
        for axis, (extent, stride) in enumerate(zip(part.shape, torch.empty(wide).stride(), strict=True))
    )
    assert torch.equal(torch.as_tensor(offsets), part)  # where the kernel will read: each number is its own place


def test_stages_shown_are_those_of_the_kernel_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE_DIR", str(tmp_path))
    leaf_operator.cache_clear()
    suite = suite_of("add_rms_norm")
    case = case_of(suite, "4x2048 float32")
    shown = stages("add_rms_norm", case)
    assert list(shown.stages) == ["torch", "linalg", "transformed", "bufferized", "llvm", "asm"]
    assert (tmp_path / "mlir" / f"{shown.digest}.json").exists()
    inputs = suite.make_inputs(case)
    assert leaf_operator("add_rms_norm").prepare(inputs[:3], inputs[3]).kernel.digest == shown.digest
    assert "torch.aten.rsqrt" in shown.stages["torch"] and "linalg.generic" in shown.stages["linalg"]
    assert "scf.forall" in shown.stages["transformed"] and "vector<64xf32>" in shown.stages["transformed"]
    assert "llvm.noalias" in shown.stages["bufferized"] and "<add_rms_norm>" in shown.stages["asm"]


def test_rows_share_a_loop_only_with_what_is_made_row_by_row() -> None:
    a, b = torch.empty(6, 8), torch.empty(6, 8)
    assert "scf.forall" in lower(lambda a, b: (a - a.sum(1, keepdim=True)) * b, (a, b), "rows")["transformed"]
    assert "transformed" not in lower(lambda a, b: (a - a.t().sum(1)) * b, (a, b), "columns")  # once, not once a row
