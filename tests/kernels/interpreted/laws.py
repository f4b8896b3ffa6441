"""Kernels that `test_triton.py` runs with TRITON_INTERPRET=1. Unwritten memory is NaN throughout."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import compiled_kernels
from compiled_kernels import Backend, BackendError
from compiled_kernels.capabilities import BF16_DOTS, GAPS, Gap, known_gap
from compiled_kernels.cases import case_of, map_tensors, suite_of
from compiled_kernels.check import verdict
from compiled_kernels.linear import triton as products
from compiled_kernels.masks import Causal
from compiled_kernels.paged_attention import triton as attention
from compiled_kernels.paged_attention.api import flatten
from compiled_kernels.quantized_attention import triton as packed_attention
from compiled_kernels.triton_code.launch import run
from tests.helpers import hidden_pages
from tests.helpers.interpreter import set_up_once_a_launch
from tests.helpers.kernels import kernel_problem, with_call
from tests.helpers.rows import Row, rows
from tests.kernels.kernel_rows import AT_TILES, KERNELS, kernel_rows
from tests.thorough import THOROUGH, run_seed

__all__ = ["set_up_once_a_launch"]  # a fixture
OPERATORS = [name for name in KERNELS if not known_gap(name, Backend.TRITON, suite_of(name).cases[0].name)]
MAX_WORK = 2_000_000 if THOROUGH else 200_000  # of a case that is tried here; `workbench kernels check` tries them all


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """torch.empty and its kin give NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.ones(1).new_empty((3, 5)).isnan().all() and torch.empty_like(torch.ones(3)).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def test_backend_has_every_operator_but_those_of_the_gap_table() -> None:
    assert set(KERNELS) - set(OPERATORS) == {"log_softmax"}


@pytest.mark.sampled(110)
@pytest.mark.parametrize(("backend", "operator", "row", "threads"), kernel_rows(Backend.TRITON))
def test_kernel_equals_float64(backend: Backend, operator: str, row: Row, threads: int) -> None:
    assert kernel_problem(operator, backend, row, run_seed()) is None


@pytest.mark.parametrize("operator", OPERATORS)
def test_cases_equal_float64(operator: str) -> None:
    suite = suite_of(operator)
    small = [case for case in suite.cases if max(case.cost.bytes, case.cost.flops) < MAX_WORK]
    assert small
    for case in small:
        if known_gap(operator, Backend.TRITON, case.name):
            continue  # that it is still a gap is the next test's matter
        assert verdict(suite, case, Backend.TRITON) == ("ok", ""), case.name


@pytest.mark.parametrize("gap", [gap for gap in GAPS if gap.backend is Backend.TRITON], ids=str)
def test_every_gap_is_still_open_or_mended(gap: Gap) -> None:
    suite = suite_of(gap.operator)
    covered = [case for case in suite.cases if gap.covers(suite.operator, gap.backend, case.name)]
    cheapest = min(covered, key=lambda case: case.cost.bytes)
    assert verdict(suite, cheapest, Backend.TRITON) == (("ok", "") if gap.worked_around_in else ("gap", gap.reason))


# Contexts of several tiles of 16 keys: of one, of one less and one more; fewer parts than tiles, and more.
LONGER = {
    "paged_attention": [{"contexts": (15, 16, 17, 90), "spans": (1, 1, 1, 1)}, AT_TILES],
    "linear_quantized": [{"out": 40}],  # two tiles of outputs
    "quantized_attention": [{"contexts": (60, 16), "spans": (1, 1)}, {"contexts": (24, 17), "spans": (20, 17)}],
}


def in_parts(operator: str) -> list[tuple[Row, int]]:
    """Return an operator's rows, those of attention over long contexts, each with a number of parts."""
    longer = LONGER.get(operator, [{}])
    plans = [row for row in KERNELS[operator].rows() if not row.get("panels") and "activations" not in row]
    table = list(enumerate(plans))
    return [(row | longer[number % len(longer)], (1, 2, 3, 8)[number % 4]) for number, row in table]


PLANS = {
    "paged_attention": lambda *inputs, splits: attention.plan(*inputs, tile=16, splits=splits),
    "quantized_attention": packed_attention.plan,
    "linear_quantized": products.plan,
}


@pytest.mark.sampled(40)
@pytest.mark.parametrize(
    ("operator", "row", "splits"), [(operator, *each) for operator in PLANS for each in in_parts(operator)]
)
def test_any_number_of_parts_equals_float64(operator: str, row: Row, splits: int) -> None:
    """More parts than there is work for, too, a walk of many tiles, and spans within which tokens settle."""
    ours = with_call(operator, lambda *inputs: run(*PLANS[operator](*inputs, splits=splits)))
    assert kernel_problem(ours, Backend.TRITON, row, run_seed()) is None


@pytest.mark.parametrize("row", list(KERNELS["paged_attention"].rows())[:4])
def test_nan_stays_with_its_row(row: Row) -> None:
    suite = suite_of("paged_attention")
    inputs = suite.input_maker(torch.Generator().manual_seed(0), **row | {"mask": Causal()})
    q, starts = inputs[0], inputs[2].starts.tolist()
    clean = suite.call(*inputs, backend=Backend.TRITON)
    spoiled = len(q) // 2
    q[spoiled] = torch.nan
    out = suite.call(*inputs, backend=Backend.TRITON)
    assert out[spoiled].isnan().all()
    others = [token for first, last in pairwise(starts) for token in range(first, last) if token != spoiled]
    assert torch.equal(out[others], clean[others])


def test_rows_of_no_span_give_zeros() -> None:
    suite = suite_of("paged_attention")
    inputs = list(suite.make_inputs(case_of(suite, "mixed float32")))
    count = len(inputs[0])
    inputs[0] = torch.cat([inputs[0], torch.full_like(inputs[0][:2], torch.nan)])
    out = suite.call(*inputs, backend=Backend.TRITON)
    assert out[:count].isfinite().all() and torch.equal(out[count:], torch.zeros_like(out[count:]))


@rows({"vocab": [2049, 3, 70], "value": [0.0, 3.0], "count": [3, 1, 9], "odd": [False, True]},
      valid=lambda vocab, count, **_: count <= vocab)  # fmt: skip
def test_equal_logits_come_by_token_id(vocab: int, value: float, count: int, odd: bool) -> None:
    choices = torch.tensor([0.0, -0.0, 1.5, -2.0, -torch.inf])
    logits = choices[torch.randint(len(choices), (2, vocab), generator=torch.Generator().manual_seed(run_seed()))]
    logits[0, ::2], logits[0, 1::2] = value, -value  # equal only where both are zero
    if odd:
        logits[1, vocab // 2] = torch.nan
    expected, ids = compiled_kernels.top_logprobs(logits, count)
    found, found_ids = compiled_kernels.top_logprobs(logits, count, Backend.TRITON)
    assert torch.equal(ids, found_ids)
    torch.testing.assert_close(expected, found, equal_nan=True)


@pytest.mark.parametrize("operator", OPERATORS)
def test_registered_forms_pass_opcheck_and_a_graph_holds_them(operator: str) -> None:
    form, arguments = registered(operator)
    assert set(torch.library.opcheck(form, arguments).values()) == {"SUCCESS"}
    torch._dynamo.reset()
    written = map_tensors(torch.clone, arguments)
    found = torch.compile(lambda *each: form(*each), backend="aot_eager", fullgraph=True)(*written)
    torch.testing.assert_close(form(*arguments), found, rtol=0, atol=0)
    before, after = ([each for each in given if isinstance(each, Tensor)] for given in (arguments, written))
    torch.testing.assert_close(before, after, rtol=0, atol=0, equal_nan=True)  # pages too


def registered(operator: str) -> tuple[Any, tuple]:
    """Return the opaque operation and a small case as its schema takes it."""
    suite = suite_of(operator)
    inputs = suite.make_inputs(min(suite.cases, key=lambda case: case.cost.bytes))
    arguments = inputs
    if operator.endswith("attention"):
        q, kv, spans, parameters = inputs
        arguments = q, *kv.flat, *flatten(spans, parameters, operator, Backend.TRITON)
    return getattr(torch.ops.compiled_kernels, f"{operator}_triton").default, arguments


def test_backend_states_its_gaps() -> None:
    packed = torch.ones(1, 48), torch.zeros(2, 6, dtype=torch.int32), torch.ones(2, 2), None, None, "int4", 24
    q, kv, *rest = suite_of("paged_attention").make_inputs(suite_of("paged_attention").cases[-1])
    for operator, arguments, words in (
        ("rms_norm", (torch.ones(1, 4).double(), torch.ones(4), 1e-5), "supports .* not torch.float64"),
        ("top_logprobs", (torch.ones(1, 5), 6), "gives 1 to 5 entries of 5, not 6"),
        ("linear_quantized", packed, ".*groups of a power of two columns, 8 or more, not 24"),
        ("paged_attention", (q, kv._replace(keys=kv.keys.transpose(2, 3)), *rest), "reads contiguous pages"),
    ):
        with pytest.raises(BackendError, match=f"{operator}: .*{words}"):
            getattr(compiled_kernels, operator)(*arguments, backend=Backend.TRITON)


@triton.jit
def bare_dot(a, b, out):
    row = tl.arange(0, 16)[:, None]
    column = tl.arange(0, 16)[None, :]
    at = row * 16 + column
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at)))


@triton.jit
def as_they_are_stored(a, out):
    at = tl.arange(0, 16)
    tl.store(out + at, tl.load(a + at).to(out.dtype.element_ty))


@pytest.mark.parametrize("numbers", [torch.arange(16, dtype=torch.int8), torch.arange(16) + 2**-8 + 2**-10])
def test_interpreter_still_converts_wrongly_to_bfloat16(numbers: Tensor) -> None:
    out = torch.zeros(16, dtype=torch.bfloat16)
    as_they_are_stored[(1,)](numbers, out)
    assert not torch.equal(out, numbers.to(torch.bfloat16))


def test_interpreter_is_still_wrong_in_bfloat16() -> None:
    """The day this fails, what `UPCAST` in compiled_kernels/triton_code/dots.py is for has gone, or a part of it, and
    the mended rows go from the table of gaps."""
    mended = {gap.operator for gap in GAPS if gap.reason == BF16_DOTS}
    products_mended = {"linear_quantized", "expert_linear"}
    assert mended == products_mended | {"paged_attention", "quantized_attention"}
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(16, 16, generator=generator) for _ in range(2))
    for dtype, right in ((torch.float32, True), (torch.bfloat16, False)):
        out = torch.zeros(16, 16)
        bare_dot[(1,)](a.to(dtype), b.to(dtype), out)
        assert torch.allclose(out, a.to(dtype).float() @ b.to(dtype).float(), atol=1e-4) is right, dtype


@rows({"operator": ["paged_attention", "quantized_attention"], "shown": [*hidden_pages.MASKS],
       "spans": [(1, 1, 1), (3, 1, 1)]}, {"shown": hidden_pages.CHOSEN})  # fmt: skip
def test_hidden_pages_are_not_read(operator: str, shown: str, spans: tuple[int, ...]) -> None:
    assert hidden_pages.hidden_page_problem(operator, Backend.TRITON, "causal", shown, spans) is None
