"""Native code is never given what it was not compiled for: wrong arguments are named, and memory stays whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

import compiled_kernels
from compiled_kernels import Backend
from compiled_kernels.cases import case_of, suite_of
from compiled_kernels.check import check
from compiled_kernels.expert_linear.cases import random_stack
from compiled_kernels.expert_linear.stacks import stack_to_panels
from compiled_kernels.linear.matrix_format import MatrixFormat
from compiled_kernels.mlir import stages
from compiled_kernels.mlir.invoke import check_argument
from compiled_kernels.mlir.leaf import LeafOperator
from tests.helpers.kernels import needs_mlir
from tests.helpers.refusals import kernel_refuses

CASES = {
    "linear": "3x128x7 float32",
    "linear_quantized": "3x128x7 int8 bfloat16",
    "linear_quantized by group": "3x128x7 int4 by 32 with minima bfloat16",
    "kv_write": "5x1x6 float32",
    "paged_attention": "mixed float32",
    "linear_quantized of INT8": "6x352x64 int8 INT8 activations panels float32",
    "linear in panels": "7x64x64 panels float32",
    "expert_linear": "5 of 3 64x64 panels float32",
}
Change = Callable[[Any], object]
narrower: Callable[[torch.Tensor], torch.Tensor] = lambda part: part[..., :-1].contiguous()  # noqa: E731
strided: Callable[[torch.Tensor], torch.Tensor] = lambda part: torch.stack([part, part], dim=-1)[..., 0]  # noqa: E731
WRONG: list[tuple[str, int | str, Change, str]] = [
    ("linear", 0, narrower, "weight as .7, 127. .* .7, 128. float32"),
    ("linear", 0, torch.Tensor.double, "needs x as .* float32 or bfloat16 on the CPU; .* float64 on cpu given"),
    ("linear", 2, narrower, "bias as .7."),
    ("linear_quantized", 1, torch.Tensor.short, "weight as .* int8 on the CPU; .* int16"),
    ("linear_quantized", 2, torch.Tensor.bfloat16, "scales as .7. float32"),
    ("linear_quantized", 2, narrower, "scales as .7. float32"),
    ("linear_quantized by group", 1, narrower, "weight as .7, 16. int32"),
    ("linear_quantized by group", 1, torch.Tensor.char, "weight as .7, 16. int32 .*int8"),
    ("linear_quantized by group", 1, torch.Tensor.byte, "weight as .7, 16. int32 .*uint8"),
    ("linear_quantized by group", 5, lambda codes: "int5", "no format is called 'int5'"),
    ("linear_quantized by group", 2, torch.Tensor.double, "scales as .7, 4. float16 or bfloat16 or float32 .*float64"),
    ("linear_quantized by group", 2, narrower, "scales as .7, 4."),
    ("linear_quantized by group", 3, narrower, "minima as .7, 4."),
    ("linear_quantized by group", 6, lambda group: 48, "INT4 groups of 48 do not divide 128 columns"),
    ("kv_write", 0, strided, "pages as .*contiguous; .* not contiguous given"),
    ("kv_write", 0, torch.Tensor.double, "pages as .*float64"),
    ("kv_write", 1, narrower, "rows as .5, 1, 6."),
    ("kv_write", 2, torch.Tensor.float, "slots as .5. int32 or int64"),
    ("kv_write", 2, lambda slots: slots + 99, "slots must lie in 0..14; .* given"),
    ("kv_write", 2, lambda slots: slots - 99, "slots must lie in 0..14; .* given"),
    ("paged_attention", 0, torch.Tensor.half, "q as .* float32 or bfloat16 .* float16"),
    ("paged_attention", 0, narrower, "keys as"),
    ("paged_attention", "keys", strided, "keys as .*not contiguous"),
    ("paged_attention", "values", strided, "values as .*not contiguous"),
    ("paged_attention", "values", torch.Tensor.bfloat16, "values as .* float32 on the CPU, contiguous; .* bfloat16"),
    ("paged_attention", "values", lambda values: values[:1], "values as"),
    (
        "paged_attention",
        "page_table",
        lambda table: table[:, :1],
        "a context of 30 does not fit the table's 1 pages of 4",
    ),
    ("paged_attention", "starts", lambda starts: starts + 1, "spans end at 23, after 22 queries"),
    ("paged_attention", "context_lengths", narrower, "context_lengths as .4."),
    ("linear_quantized of INT8", 0, narrower, "weight as"),
    ("linear_quantized of INT8", 0, torch.Tensor.double, "x as"),
    ("linear_quantized of INT8", 1, lambda values: values.to(torch.uint8), "weight as"),
    ("linear_quantized of INT8", 2, narrower, "scales as"),
    ("linear_quantized of INT8", 4, narrower, "bias as"),
    ("linear in panels", 0, narrower, "x as"),
    ("linear in panels", 0, torch.Tensor.bfloat16, "not of"),
    ("linear in panels", 0, torch.Tensor.double, "x as"),
    ("expert_linear", 1, lambda expert: expert + 99, r"experts must lie in 0\.\.2; 99\.\..* given"),
    ("expert_linear", 1, lambda expert: expert - 9, r"experts must lie in 0\.\.2; -9\.\..* given"),
]


def packed_experts(change: Change) -> None:
    """Call two experts of INT4 by 32 in panels, with other scales."""
    format = MatrixFormat("int4", 32, torch.float16)
    stack = random_stack(torch.Generator().manual_seed(0), format, (2, 64, 352), torch.float32)
    codes, scales, _ = stack_to_panels(*stack)
    rows = torch.ones(2, 352), torch.tensor([0, 1])
    scales = cast(Any, change(scales))
    compiled_kernels.expert_linear(*rows, cast(Any, codes), None, scales, None, "int4", Backend.MLIR)


def argument(part: torch.Tensor, shape: tuple[int, ...], **more: bool) -> None:
    check_argument("any", "part", part, shape, (torch.float32,), **more)


def w8a8(width: int, backend: Backend) -> None:
    x, values = torch.ones(1, width), torch.ones(1, width, dtype=torch.int8)
    compiled_kernels.linear_quantized(x, values, torch.ones(1), activations="int8", backend=backend)


CALLS: list[tuple[Callable[[], object], str]] = [
    (lambda: stages("rms"), "unknown operator 'rms'"),
    (lambda: list(check(operator="rotray")), "unknown operator 'rotray'; did you mean 'rotary'?"),
    (
        lambda: LeafOperator("rms_norm", lambda x: x).prepare((torch.empty(2, 2, device="meta"),)),
        r"rms_norm: backend mlir runs on the CPU; \['meta'\] given",
    ),
    (lambda: w8a8(131_073, Backend.EAGER), "int32 sums are exact up to 131,072 columns, not for 131,073"),
    (lambda: w8a8(64, Backend.TRITON), "linear_quantized: backend triton multiplies activations in float, not in INT8"),
    (
        lambda: packed_experts(lambda scales: scales[:, :, 1:].contiguous()),
        "expert_linear: 10 scales per row do not divide 352 columns into equal groups; use a divisor of 352",
    ),
    (lambda: packed_experts(lambda scales: scales[1:]), "scales"),
    *((lambda backend=backend: compiled_kernels.add_rms_norm(
        torch.ones(1, 8), torch.ones(5, 8), torch.ones(8), 1e-5, backend
    ), r"x \[1, 8\] and residual \[5, 8\] must have one shape") for backend in Backend),
    (lambda: argument(torch.ones(2, 3).t(), (3, 2)), "any: backend mlir needs part as .3, 2. float32 on the CPU, cont"),
    (lambda: argument(torch.ones(2, device="meta"), (2,)), "on the CPU, contiguous; .2. float32 on meta given"),
]  # fmt: skip


@needs_mlir
@pytest.mark.parametrize(("call", "words"), CALLS)
def test_wrong_calls_are_refused_in_one_line(call: Callable[[], object], words: str) -> None:
    kernel_refuses(words, call)


def _changed(value: Any, field: str, change: Change) -> Any:
    """`value`, with a field changed where it has that field."""
    return value._replace(**{field: change(getattr(value, field))}) if field in getattr(value, "_fields", ()) else value


@needs_mlir
@pytest.mark.parametrize(("operator", "place", "change", "words"), WRONG)
def test_wrong_arguments_are_refused_in_words(operator: str, place: int | str, change: Change, words: str) -> None:
    case, operator = CASES[operator], operator.partition(" ")[0]
    suite = suite_of(operator)
    inputs = list(suite.make_inputs(case_of(suite, case)))
    if isinstance(place, str):
        inputs = [_changed(each, place, change) for each in inputs]
    else:
        inputs[place] = change(inputs[place])
    call = compiled_kernels.kv_write if operator == "kv_write" else suite.call
    kernel_refuses(f"{operator}: .*{words}", call, *inputs, backend=Backend.MLIR)


@needs_mlir
@pytest.mark.parametrize("operator", ["linear", "linear_quantized", "linear_quantized by group"])
def test_layouts_that_are_slices_are_read_right(operator: str) -> None:
    suite = suite_of(operator.partition(" ")[0])
    inputs = suite.make_inputs(case_of(suite, CASES[operator]))
    sliced = tuple(strided(part) if isinstance(part, torch.Tensor) else part for part in inputs)
    assert torch.equal(suite.call(*sliced, backend=Backend.MLIR), suite.call(*inputs, backend=Backend.MLIR))


@needs_mlir
def test_a_slot_beyond_the_pages_touches_nothing() -> None:
    around = torch.full((12, 1, 3, 6), 7.0)
    pages, rows = around[4:8], torch.ones(3, 1, 6)
    kernel_refuses(
        "slots must lie in 0..11; -3..12 given",
        lambda: compiled_kernels.kv_write(pages, rows, torch.tensor([12, 5, -3]), Backend.MLIR),
    )
    assert (around[:4] == 7).all() and (around[8:] == 7).all()
    assert (pages[1, :, 2] == 1).all() and (pages == 1).sum() == 6


@needs_mlir
def test_outputs_are_as_large_as_what_is_written() -> None:
    """bfloat16 and a float32 residual: the sum once came back wider than the memory taken for it."""
    x, residual = torch.randn(9, 640).bfloat16(), torch.randn(9, 640)
    given = x, residual, torch.ones(640), 1e-5
    theirs = compiled_kernels.add_rms_norm(*given, Backend.EAGER)
    ours = compiled_kernels.add_rms_norm(*given, Backend.MLIR)
    assert [each.dtype for each in ours] == [torch.bfloat16] * 2
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


def test_what_is_right_passes() -> None:
    argument(torch.ones(2, 3).t(), (3, 2), contiguous=False)
