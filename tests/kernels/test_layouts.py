"""An operation's output has the layout its fake states, for inputs of any layout; copies keep their inputs'."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compiled_kernels import Backend
from compiled_kernels.capabilities import known_gap
from compiled_kernels.cases import case_of, suite_of
from compiled_kernels.check import copy_with_strides, to_device
from compiled_kernels.paged_attention.api import flatten
from tests.helpers.kernels import needs, needs_mlir
from tests.kernels.kernel_rows import KERNELS

OPERATORS = [name for name in KERNELS if not known_gap(name, Backend.MLIR, "") and name != "quantized_attention"]
FORMS = [pytest.param(operator, Backend.MLIR, marks=needs_mlir) for operator in OPERATORS]
FORMS += [pytest.param("paged_attention", each, marks=needs(each)) for each in (Backend.EAGER, Backend.INDUCTOR)]


LAYOUTS: list[Callable[[Tensor], Tensor]] = [
    lambda part: part,
    lambda part: part.transpose(0, -1).contiguous().transpose(0, -1),  # dense, the first axis the fastest
    lambda part: torch.cat([part, part], dim=-1)[..., : part.shape[-1]],
    lambda part: torch.stack([part, part], dim=1)[:, 0],
    lambda part: part[:1].expand_as(part),
]


@pytest.mark.parametrize(("operator", "backend"), FORMS)
def test_torch_knows_the_form_for_inputs_of_any_layout(operator: str, backend: Backend) -> None:
    """Schema, dispatch, and where the fake says that the output lies; the numbers are those of contiguous rows; and one
    graph holds the operation at its first call."""
    suite = suite_of(operator)
    row = next(row for row in KERNELS[operator].rows() if operator != "paged_attention" or set(row["spans"]) != {1})
    first, *rest = inputs = suite.input_maker(torch.Generator().manual_seed(0), **row)
    form = getattr(torch.ops.compiled_kernels, f"{operator}_{backend}").default
    for layout in LAYOUTS[: 1 if operator == "kv_write" else None]:  # pages must be contiguous
        arguments = (layout(first), *rest)
        if backend is Backend.MLIR:
            rows = layout(first), layout(first).contiguous()
            found, exact = (suite.call(each, *rest, backend=backend) for each in rows)
            torch.testing.assert_close(found, exact, equal_nan=True)
        if operator == "paged_attention":
            q, kv, spans, parameters = arguments
            arguments = (q, *kv.flat, *flatten(spans, parameters, operator, backend))
        torch.library.opcheck(form, arguments, test_utils=("test_schema", "test_faketensor"))
    torch._dynamo.reset()
    whole = torch.compile(lambda *values: suite.call(*values, backend=backend), fullgraph=True, backend="eager")
    torch.testing.assert_close(whole(*inputs), suite.call(*inputs, backend=backend), rtol=0, atol=0, equal_nan=True)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), min_size=1, max_size=4), st.randoms())
def test_copies_keep_numbers_and_strides(axes: list[tuple[int, int]], random: Any) -> None:
    whole = torch.randn([extent + more for extent, more in axes])
    part = whole[tuple(slice(more, None) for _, more in axes)].permute(random.sample(range(len(axes)), len(axes)))
    copy = copy_with_strides(part)
    assert torch.equal(copy, part) and copy.stride() == part.stride()
    assert not part.numel() or copy.untyped_storage().data_ptr() != part.untyped_storage().data_ptr()


def test_cases_are_timed_and_moved_as_they_lie() -> None:
    suite = suite_of("rotary")
    x, *_ = inputs = suite.make_inputs(case_of(suite, "5x3x2 float32"))
    assert not x.is_contiguous() and copy_with_strides(x).stride() == x.stride()
    there = to_device(inputs, "meta")
    assert there[0].stride() == x.stride() and there[0].device.type == "meta"
    assert to_device(inputs, "cpu")[0] is x
