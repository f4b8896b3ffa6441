"""Weights in panels: the layout, and products of a decode step at every level. That products equal float64 is
`test_agreement.py`'s."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compiled_kernels.blocked import as_words, from_panels, panels_problem, to_panels
from compiled_kernels.blocked.layout import VALUES_PER_WORD, over_rows
from compiled_kernels.blocked.shape import TILE_ROWS
from compiled_kernels.builder.target import MLIR_TYPES, Target
from compiled_kernels.cases import random_normal
from compiled_kernels.level import Level, limited_to
from compiled_kernels.linear import mlir
from compiled_kernels.linear.quantize import quantize_int8
from compiled_kernels.mlir.invoke import BoundCall
from tests.helpers.kernels import needs_mlir
from tests.helpers.levels import at_every_level

KINDS = ("float32", "bfloat16", "float16", "int8")
WIDTH, OUT = 352, 192  # two blocks along the width, of which the second is shorter; three pairs of panels


@given(
    panels=st.integers(1, 3), words_long=st.integers(1, 9),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int32]),
)  # fmt: skip
def test_the_layout_is_a_rearrangement(panels: int, words_long: int, dtype: torch.dtype) -> None:
    """Column c of panel p is row 32 p + c of the weight; a matrix in words keeps them."""
    numbers = torch.arange(64 * panels * words_long * VALUES_PER_WORD[dtype])
    weight = numbers.view(64 * panels, -1).to(dtype)
    laid_out = to_panels(weight)
    assert torch.equal(from_panels(laid_out), weight) and laid_out.nbytes == weight.nbytes
    assert from_panels(weight) is weight  # a plain one is left alone
    assert as_words(laid_out).data_ptr() == laid_out.data_ptr()
    stack = torch.stack([weight, -weight])
    assert torch.equal(to_panels(stack), torch.stack([laid_out, to_panels(-weight)]))  # of experts
    assert torch.equal(from_panels(to_panels(stack)), stack)
    values = laid_out.shape[-1]
    assert torch.equal(laid_out[-1, 0, 5], weight[64 * panels - 32 + 5, :values])


def test_rows_become_panels_where_they_stand() -> None:
    rows = torch.arange(320.0).diag()  # more than are laid out at once
    expected = to_panels(rows)
    over_rows(rows, to_panels)
    assert torch.equal(rows.view_as(expected), expected)


@needs_mlir
@pytest.mark.parametrize("level", list(Level))
@pytest.mark.parametrize("kind", ["bf16", "u4", "q6_k"])
def test_products_compile_for_every_level(level: Level, kind: str) -> None:
    """Also for those that this machine lacks, of columns that are no whole panels: code there calls no library."""
    scales = {"bf16": (), "u4": ("f16", "f16"), "q6_k": ("f16",)}[kind]
    for tokens in (1, 0):
        shape = 512, 530, kind, "bf16", True, 16 if kind == "q6_k" else 32 * bool(scales)
        kernel, _ = mlir._compiled.__wrapped__(Target(level), tokens, False, False, *shape, *scales)
        assert kernel.stages


@pytest.mark.parametrize(
    ("weight", "reason"),
    [(torch.zeros(2, 63, 64), "multiples of 64"), (torch.zeros(64, 63, dtype=torch.bfloat16), "multiples of 2"),
     (torch.zeros(64, 64, dtype=torch.float64), "not float64"), (torch.zeros(64), "not 1 dim")],
)  # fmt: skip
def test_what_does_not_fit_is_refused(weight: Tensor, reason: str) -> None:
    assert reason in (panels_problem(weight) or "")
    with pytest.raises(ValueError, match=reason):
        to_panels(weight)


@functools.cache
def inputs(kind: str) -> tuple[Tensor, ...]:
    """Return x of 17 rows, the weight in panels, its scales where it is of codes, and a bias."""
    generator = torch.Generator().manual_seed(3)
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    x, weight, bias = (random_normal(generator, dtype, shape) for shape in ((17, WIDTH), (OUT, WIDTH), (OUT,)))
    values, *scales = quantize_int8(weight) if kind == "int8" else (weight.half() if kind == "float16" else weight,)
    return x, to_panels(values), *scales, bias


@needs_mlir
@at_every_level
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_decode_step_have_the_bits_of_a_row_alone(kind: str, level: Level) -> None:
    """A step's products are of few rows whatever their number: in one pass over each panel, or in several."""
    x, weight, *added = inputs(kind)
    rest = [as_words(weight), *added]
    codes = (0, "f32") if kind == "int8" else (0,)

    def product(rows: Tensor) -> Tensor:
        kinds = MLIR_TYPES[weight.dtype], MLIR_TYPES[x.dtype], True, *codes
        kernel, _ = mlir._compiled(Target.current(), len(rows), False, False, WIDTH, OUT, *kinds)
        found = torch.full((len(rows), OUT), torch.nan)
        BoundCall(kernel.address, (rows, *rest, found, torch.tensor([len(rows)])))()
        return found

    with limited_to(level):
        alone = torch.cat([product(x[row : row + 1]) for row in range(17)])
        for count in (8, TILE_ROWS * 2, 13, 17):
            assert torch.equal(product(x[:count]), alone[:count])
