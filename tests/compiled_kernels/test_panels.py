"""Weights in panels: the layout, and its products, on every level that this machine can carry out."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import compiled_kernels
from compiled_kernels import Backend, BackendError, backend_problems
from compiled_kernels.blocked import as_words, from_panels, panels_problem, to_panels
from compiled_kernels.blocked import mlir as blocked
from compiled_kernels.blocked.shape import TILE_ROWS
from compiled_kernels.cases import random_normal
from compiled_kernels.level import Level, available_levels, limited_to
from compiled_kernels.linear.quantize import quantize_int8
from compiled_kernels.mlir.invoke import BoundCall
from compiled_kernels.mlir_text import MLIR_TYPES, Target

problem = backend_problems()[Backend.MLIR]
mlir = pytest.mark.skipif(problem is not None, reason=f"backend mlir: {problem}")
KINDS = ("float32", "bfloat16", "int8")
WIDTH, OUT = 352, 192  # two blocks along the width, of which the second is shorter; three pairs of panels


@given(
    panels=st.integers(1, 3), words_long=st.integers(1, 9), dtype=st.sampled_from([torch.float32, torch.bfloat16])
)  # fmt: skip
def test_the_layout_is_a_rearrangement(panels: int, words_long: int, dtype: torch.dtype) -> None:
    weight = torch.arange(64 * panels * 4 * words_long).view(64 * panels, -1).to(dtype)
    laid_out = to_panels(weight)
    assert torch.equal(from_panels(laid_out), weight) and laid_out.nbytes == weight.nbytes
    assert from_panels(weight) is weight  # a plain one is left alone
    assert as_words(laid_out).data_ptr() == laid_out.data_ptr()
    values = laid_out.shape[-1]
    assert torch.equal(laid_out[-1, 0, 5], weight[64 * panels - 32 + 5, :values])


@pytest.mark.parametrize(
    ("weight", "reason"),
    [(torch.zeros(63, 64), "multiples of 64"), (torch.zeros(64, 63), "multiples of 2"),
     (torch.zeros(64, 64, dtype=torch.float64), "not float64"), (torch.zeros(64), "not of 1 dim")],
)  # fmt: skip
def test_what_does_not_fit_is_refused(weight: Tensor, reason: str) -> None:
    assert reason in (panels_problem(weight) or "")
    with pytest.raises(ValueError, match=reason):
        to_panels(weight)


@functools.cache
def inputs(kind: str) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """x of many rows, the weight in panels, its scales, a bias, and the exact product."""
    generator = torch.Generator().manual_seed(3)
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    x, weight = (
        random_normal(generator, dtype, (797, WIDTH)),
        random_normal(generator, dtype, (OUT, WIDTH)) * WIDTH**-0.5,
    )
    bias = random_normal(generator, dtype, (OUT,))
    if kind != "int8":
        return x, to_panels(weight), None, bias, x.double() @ weight.double().T + bias.double()
    values, scales = quantize_int8(weight)
    return x, to_panels(values), scales, bias, x.double() @ (values * scales.double()[:, None]).T + bias.double()


@pytest.fixture(params=available_levels(), ids=str)
def level(request: pytest.FixtureRequest) -> Iterator[Level]:
    with limited_to(request.param):
        yield request.param


@mlir
@pytest.mark.parametrize("kind", KINDS)
def test_products_of_any_number_of_rows(kind: str, level: Level) -> None:
    """Few rows, many, runs of rows, and a last tile that is not whole; rows beside are no numbers. A row has the same
    bits in each."""
    x, weight, scales, bias, exact = inputs(kind)
    alone = blocked.linear("linear", x[2:3], weight, scales, bias)
    for rows in (1, 3, TILE_ROWS, TILE_ROWS + 1, 13, 797):
        beside = x[:rows].clone()
        beside[rows // 2 + 1 :: 4] = torch.nan
        clean = ~beside.isnan().any(dim=1)
        out = blocked.linear("linear", beside, weight, scales, bias)
        bound = (2e-5 if kind == "float32" else 2e-2) * (1 + exact[:rows].abs().max())
        assert not out[~clean].isfinite().any()
        assert (out.double() - exact[:rows])[clean].abs().max() < bound
        if rows > 2 and clean[2]:
            assert torch.equal(out[2:3], alone)


@mlir
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_decode_step_have_the_bits_of_a_row_alone(kind: str, level: Level) -> None:
    """A step's products are of few rows whatever their number: in one pass over each panel, or in several."""
    x, weight, scales, bias, _ = inputs(kind)
    given = [as_words(weight), *(part for part in (scales, bias) if part is not None)]

    def product(rows: Tensor) -> Tensor:
        sizes, types = (len(rows), WIDTH, OUT), (MLIR_TYPES[weight.dtype], MLIR_TYPES[x.dtype])
        found = torch.full((len(rows), OUT), torch.nan)
        BoundCall(blocked.few_rows(Target.current(), "step", *sizes, *types, True).address, (rows, *given, found))()
        return found

    alone = torch.cat([product(x[row : row + 1]) for row in range(17)])
    for count in (8, TILE_ROWS * 2, 13, 17):
        assert torch.equal(product(x[:count]), alone[:count])


@mlir
def test_what_native_code_must_not_be_given() -> None:
    x, weight, _, _, _ = inputs("float32")
    for bad, wanted in ((x[:, :-1], "x as"), (x.bfloat16(), "not of"), (x.double(), "x as")):
        with pytest.raises(BackendError, match=wanted):
            compiled_kernels.linear(bad, weight, None, Backend.MLIR)


def test_other_lanes_read_panels_too() -> None:
    x, weight, _, bias, exact = inputs("float32")
    out = compiled_kernels.linear(x, weight, bias, Backend.EAGER)
    assert (out.double() - exact).abs().max() < 1e-4
