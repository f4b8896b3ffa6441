"""Each operator's claim: a row has the same bits alone and among others, or the table says why not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import compiled_kernels
from compiled_kernels import Backend, backend_problems
from compiled_kernels.capabilities import BATCH_VARIANT, batch_variance
from compiled_kernels.cases import random_normal, suites
from compiled_kernels.linear.quantize import quantize_int4, quantize_int8
from tests.thorough import tries

Run = Callable[[Tensor, Backend], Tensor]


def linear(generator: torch.Generator, width: int, dtype: torch.dtype) -> Run:
    weight = random_normal(generator, dtype, (33, width))
    return lambda x, backend: compiled_kernels.linear(x, weight, None, backend)


def linear_int8(generator: torch.Generator, width: int, dtype: torch.dtype) -> Run:
    stored = quantize_int8(random_normal(generator, dtype, (33, width)))
    return lambda x, backend: compiled_kernels.linear_int8(x, *stored, None, backend)


def linear_grouped(generator: torch.Generator, width: int, dtype: torch.dtype) -> Run:
    stored = quantize_int4(random_normal(generator, dtype, (33, width)), 16)
    return lambda x, backend: compiled_kernels.linear_grouped(x, *stored, None, None, 16, backend)


def rms_norm(generator: torch.Generator, width: int, dtype: torch.dtype) -> Run:
    weight = random_normal(generator, dtype, (width,))
    return lambda x, backend: compiled_kernels.rms_norm(x, weight, 1e-5, backend)


def rotary(generator: torch.Generator, width: int, dtype: torch.dtype) -> Run:
    angles = random_normal(generator, torch.float32, (1, 8))
    cos, sin = angles.cos(), angles.sin()

    def run(x: Tensor, backend: Backend) -> Tensor:
        heads = x.view(len(x), -1, 16)
        return compiled_kernels.rotary(heads, cos.repeat(len(x), 1), sin.repeat(len(x), 1), backend).flatten(1)

    return run


def gated_silu(generator: torch.Generator, width: int, dtype: torch.dtype) -> Run:
    return lambda x, backend: compiled_kernels.gated_silu(x, backend)


ROWS = {each.__name__: each for each in (linear, linear_int8, linear_grouped, rms_norm, rotary, gated_silu)}
HERE = [backend for backend in (Backend.EAGER, Backend.MLIR) if backend_problems()[backend] is None]
KEPT = [(name, backend) for name in ROWS for backend in HERE if batch_variance(name, backend) is None]


@pytest.mark.parametrize(("name", "backend"), KEPT)
@settings(max_examples=tries(6), deadline=None)
@given(
    width=st.sampled_from([16, 48, 96, 128]), dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    rows=st.integers(2, 9), place=st.integers(0, 8), bad=st.sampled_from([0.0, torch.nan, torch.inf, 1e30]),
)  # fmt: skip
def test_a_row_is_the_same_alone(
    name: str, backend: Backend, width: int, dtype: torch.dtype, rows: int, place: int, bad: float
) -> None:
    """At every place, and beside rows that are no numbers."""
    generator = torch.Generator().manual_seed(width)
    run, x = ROWS[name](generator, width, dtype), random_normal(generator, dtype, (rows, width))
    place %= rows
    if bad:
        x[(place + 1) % rows] = bad
    assert torch.equal(run(x, backend)[place : place + 1], run(x[place : place + 1].clone(), backend))


def test_linear_on_the_backend_eager_is_rightly_in_the_table() -> None:
    """The negative control: some width and number of rows gives some row other bits."""
    generator = torch.Generator().manual_seed(0)
    for width in (64, 576, 1536):
        run, x = linear(generator, width, torch.float32), random_normal(generator, torch.float32, (64, width))
        alone = run(x[:1].clone(), Backend.EAGER)
        if any(not torch.equal(run(x[:rows].clone(), Backend.EAGER)[:1], alone) for rows in (2, 4, 8, 16, 64)):
            return
    pytest.fail("torch's product gives a row the same bits among any number of rows: strike it from the table")


def test_the_table_names_what_there_is() -> None:
    operators = {suite.operator for suite in suites()}
    assert {row.operator for row in BATCH_VARIANT} <= operators
    assert len({(row.operator, row.backend) for row in BATCH_VARIANT}) == len(BATCH_VARIANT)
    assert batch_variance("decode_step", Backend.MLIR) is None
    for backend in (Backend.EAGER, Backend.INDUCTOR, Backend.TRITON):
        assert (batch_variance("decode_step", backend) or "").startswith("linear: ")
