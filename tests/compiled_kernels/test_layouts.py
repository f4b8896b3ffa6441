"""An operation's output has the layout its fake states, for inputs of any layout; copies keep their inputs'."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compiled_kernels import Backend, backend_problems
from compiled_kernels.cases import case_of, suite_of
from compiled_kernels.check import copy_with_strides, to_device
from compiled_kernels.paged_attention.api import flatten

FIRST = {
    "rms_norm": "3x70 float32",
    "add_rms_norm": "3x70 float32",
    "rotary": "5x3x2 float32",
    "gated_silu": "3x33 float32",
    "log_softmax": "3x257 float32",
    "paged_attention": "mixed float32",
}


def needs(backend: Backend) -> pytest.MarkDecorator:
    problem = backend_problems()[backend]
    return pytest.mark.skipif(problem is not None, reason=f"backend {backend}: {problem}")


FORMS = [pytest.param(operator, "mlir", marks=needs(Backend.MLIR)) for operator in FIRST]
FORMS += [("paged_attention", "eager"), pytest.param("paged_attention", "inductor", marks=needs(Backend.INDUCTOR))]


def as_schema(operator: str, inputs: tuple) -> tuple:
    if operator != "paged_attention":
        return inputs
    q, kv, spans, parameters = inputs
    return (q, *kv.flat, *flatten(spans, parameters, operator, "any"))


def transposed(part: Tensor) -> Tensor:
    """The same numbers, dense, the first axis the fastest."""
    return part.transpose(0, -1).contiguous().transpose(0, -1)


def sliced(part: Tensor) -> Tensor:
    return torch.cat([part, part], dim=-1)[..., : part.shape[-1]]


@pytest.mark.parametrize("layout", [transposed, sliced])
@pytest.mark.parametrize(("operator", "backend"), FORMS)
def test_the_fake_says_where_the_output_lies(operator: str, backend: str, layout: Any) -> None:
    if backend == "inductor" and layout is sliced:
        pytest.skip("compiled once is enough")
    suite = suite_of(operator)
    first, *rest = suite.make_inputs(case_of(suite, FIRST[operator]))
    form = getattr(torch.ops.compiled_kernels, f"{operator}_{backend}").default
    arguments = as_schema(operator, (layout(first), *rest))
    torch.library.opcheck(form, arguments, test_utils=("test_schema", "test_faketensor"))


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
