"""Kernels that `test_triton.py` runs with TRITON_INTERPRET=1. Unwritten memory is NaN throughout."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import compiled_kernels
from compiled_kernels import Backend, BackendError
from compiled_kernels.agreement import disagreement
from compiled_kernels.capabilities import BF16_DOTS, GAPS, Gap, known_gap
from compiled_kernels.cases import Case, CaseCost, Suite
from compiled_kernels.check import verdict
from compiled_kernels.linear import triton as products
from compiled_kernels.masks import Causal
from compiled_kernels.paged_attention import triton as attention
from compiled_kernels.paged_attention.api import flatten
from compiled_kernels.quantized_attention import triton as packed_attention
from compiled_kernels.triton_code.launch import run
from tests.compiled_kernels import hidden_pages
from tests.compiled_kernels.interpreter import set_up_once_a_launch
from tests.compiled_kernels.test_operators import ARGUMENTS, DTYPES, SUITES, seeds
from tests.thorough import THOROUGH, tries

__all__ = ["set_up_once_a_launch"]  # a fixture
MINE = [name for name, suite in SUITES.items() if not known_gap(name, Backend.TRITON, suite.cases[0].name)]
MAX_WORK = 2_000_000 if THOROUGH else 500_000  # of a case that is tried here; `workbench kernels check` tries them all


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """torch.empty and its kin give NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.ones(1).new_empty((3, 5)).isnan().all() and torch.empty_like(torch.ones(3)).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def generator(data: st.DataObject) -> torch.Generator:
    return torch.Generator().manual_seed(data.draw(seeds))


def drawn(data: st.DataObject, operator: str, **given_: Any) -> tuple[Case, tuple]:
    dtype = torch.float32 if "vocab" in str(ARGUMENTS[operator]) else data.draw(DTYPES)
    arguments = data.draw(ARGUMENTS[operator]) | {"dtype": dtype} | given_
    return Case("drawn", arguments, CaseCost(0, 0)), SUITES[operator].input_maker(generator(data), **arguments)


def test_the_backend_has_every_operator_but_those_of_the_gap_table() -> None:
    assert set(SUITES) - set(MINE) == {"log_softmax", "linear_w8a8"}


@pytest.mark.parametrize("operator", MINE)
@settings(max_examples=tries(15), deadline=None)
@given(data=st.data())
def test_any_shape_agrees_with_float64(operator: str, data: st.DataObject) -> None:
    case, inputs = drawn(data, operator)
    assert disagreement(SUITES[operator], case, inputs, Backend.TRITON) is None


@pytest.mark.parametrize("operator", MINE)
def test_cases_agree_with_float64(operator: str) -> None:
    suite = SUITES[operator]
    small = [case for case in suite.cases if max(case.cost.bytes, case.cost.flops) < MAX_WORK]
    assert small
    for case in small:
        if known_gap(operator, Backend.TRITON, case.name):
            continue  # that it is still a gap is test_check.py's matter
        assert verdict(suite, case, Backend.TRITON) == ("ok", ""), case.name


@pytest.mark.parametrize("row", [gap for gap in GAPS if gap.backend is Backend.TRITON], ids=str)
def test_every_gap_is_still_open_or_mended(row: Gap) -> None:
    suite = SUITES[row.operator]
    covered = [case for case in suite.cases if row.covers(suite.operator, row.backend, case.name)]
    cheapest = min(covered, key=lambda case: case.cost.bytes)
    assert verdict(suite, cheapest, Backend.TRITON) == (("ok", "") if row.worked_around_in else ("gap", row.reason))


@settings(max_examples=tries(20), deadline=None)
@given(data=st.data())
def test_attention_in_any_number_of_parts_is_the_same(data: st.DataObject) -> None:
    """More parts than there is work for, too, and a walk of many tiles."""
    contexts = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=2))
    spans = [data.draw(st.sampled_from([1, context, -(-context // 3)])) for context in contexts]
    case, inputs = drawn(data, "paged_attention", contexts=contexts, spans=spans)
    splits = data.draw(st.sampled_from([1, 2, 3, 8]))

    def ours(*given_, backend):
        if backend is Backend.EAGER:
            return compiled_kernels.paged_attention(*given_)
        assert given_[2].decode_only == all(span == 1 for span in spans)
        return run(*attention.plan(*given_, tile=16, splits=splits))

    suite = Suite(
        "paged_attention", SUITES["paged_attention"].input_maker, ours, (), SUITES["paged_attention"].rounding_terms
    )
    assert disagreement(suite, case, inputs, Backend.TRITON) is None


@settings(max_examples=tries(20), deadline=None)
@given(data=st.data())
def test_attention_over_packed_pages_in_any_number_of_parts_is_the_same(data: st.DataObject) -> None:
    """Spans within which tokens settle, too."""
    contexts = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=2))
    spans = [data.draw(st.sampled_from([1, context, -(-context // 3)])) for context in contexts]
    case, inputs = drawn(data, "quantized_attention", contexts=contexts, spans=spans)
    splits, reference = data.draw(st.sampled_from([1, 2, 3, 8])), SUITES["quantized_attention"]

    def ours(*given_, backend):
        if backend is Backend.EAGER:
            return reference.call(*given_)
        return run(*packed_attention.plan(*given_, splits=splits))

    suite = Suite(
        "quantized_attention",
        reference.input_maker,
        ours,
        (),
        reference.rounding_terms,
        reference.exact,
        reference.scale,
    )
    assert disagreement(suite, case, inputs, Backend.TRITON) is None


@pytest.mark.parametrize("operator", ["linear_int8", "linear_grouped"])
@settings(max_examples=tries(15), deadline=None)
@given(data=st.data())
def test_products_in_any_number_of_parts_are_the_same(operator: str, data: st.DataObject) -> None:
    case, inputs = drawn(data, operator)
    plan = products.plan_int8 if operator == "linear_int8" else products.plan_grouped
    splits = data.draw(st.sampled_from([1, 2, 3]))
    reference = SUITES[operator]

    def ours(*given_, backend):
        return (
            reference.call(*given_, backend=backend) if backend is Backend.EAGER else run(*plan(*given_, splits=splits))
        )

    suite = Suite(operator, reference.input_maker, ours, (), reference.rounding_terms, reference.exact)
    assert disagreement(suite, case, inputs, Backend.TRITON) is None


@settings(max_examples=tries(10), deadline=None)
@given(data=st.data())
def test_nan_stays_with_its_row(data: st.DataObject) -> None:
    _, inputs = drawn(data, "paged_attention", mask=Causal())
    suite, q, starts = SUITES["paged_attention"], inputs[0], inputs[2].starts.tolist()
    clean = suite.call(*inputs, backend=Backend.TRITON)
    row = data.draw(st.integers(0, len(q) - 1))
    q[row] = torch.nan
    out = suite.call(*inputs, backend=Backend.TRITON)
    assert out[row].isnan().all()
    others = [token for first, last in pairwise(starts) for token in range(first, last) if token != row]
    assert torch.equal(out[others], clean[others])


def test_rows_of_no_span_give_zeros() -> None:
    suite = SUITES["paged_attention"]
    case = next(case for case in suite.cases if case.name == "mixed float32")
    inputs = list(suite.make_inputs(case))
    rows = len(inputs[0])
    inputs[0] = torch.cat([inputs[0], torch.full_like(inputs[0][:2], torch.nan)])
    out = suite.call(*inputs, backend=Backend.TRITON)
    assert out[:rows].isfinite().all() and torch.equal(out[rows:], torch.zeros_like(out[rows:]))


@settings(max_examples=tries(25), deadline=None)
@given(data=st.data())
def test_equal_logits_come_by_token_id(data: st.DataObject) -> None:
    vocab = data.draw(st.sampled_from([3, 70, 2049]))
    choices = [0.0, -0.0, 1.5, -2.0, -torch.inf]
    logits = torch.tensor(choices)[torch.randint(len(choices), (2, vocab), generator=generator(data))]
    logits[0, :] = data.draw(st.sampled_from([0.0, 3.0]))
    if data.draw(st.booleans()):
        logits[1, vocab // 2] = torch.nan
    count = data.draw(st.integers(1, min(vocab, 9)))
    expected, ids = compiled_kernels.top_logprobs(logits, count)
    found, found_ids = compiled_kernels.top_logprobs(logits, count, Backend.TRITON)
    assert torch.equal(ids, found_ids)
    torch.testing.assert_close(expected, found, equal_nan=True)


@pytest.mark.parametrize("operator", MINE)
def test_registered_forms_pass_opcheck(operator: str) -> None:
    form, arguments = registered(operator)
    assert set(torch.library.opcheck(form, arguments).values()) == {"SUCCESS"}


@pytest.mark.parametrize("operator", MINE)
def test_a_graph_holds_them_at_the_first_call(operator: str) -> None:
    form, arguments = registered(operator)
    torch._dynamo.reset()
    written = copied(arguments)
    found = torch.compile(lambda *each: form(*each), backend="aot_eager", fullgraph=True)(*written)
    torch.testing.assert_close(form(*arguments), found, rtol=0, atol=0)
    before, after = ([each for each in given if isinstance(each, Tensor)] for given in (arguments, written))
    torch.testing.assert_close(before, after, rtol=0, atol=0, equal_nan=True)  # pages too


def registered(operator: str) -> tuple[Any, tuple]:
    """The opaque operation and a small case as its schema takes it."""
    suite = SUITES[operator]
    inputs = suite.make_inputs(min(suite.cases, key=lambda case: case.cost.bytes))
    arguments = inputs
    if operator in ("paged_attention", "quantized_attention"):
        q, kv, spans, parameters = inputs
        arguments = q, *kv.flat, *flatten(spans, parameters, operator, Backend.TRITON)
    return getattr(torch.ops.compiled_kernels, f"{operator}_triton").default, arguments


def copied(arguments: tuple) -> tuple:
    return tuple(each.clone() if isinstance(each, Tensor) else each for each in arguments)


def test_the_backend_states_its_gaps() -> None:
    def refused(words: str, operator: str, *arguments: Any) -> None:
        with pytest.raises(BackendError, match=words):
            getattr(compiled_kernels, operator)(*arguments, backend=Backend.TRITON)

    double = torch.ones(1, 4).double()
    refused("rms_norm: backend triton knows .* not torch.float64", "rms_norm", double, torch.ones(4), 1e-5)
    refused("top_logprobs: backend triton gives 1 to 5 entries of 5, not 6", "top_logprobs", torch.ones(1, 5), 6)
    codes, scales = torch.zeros(2, 6, dtype=torch.uint8), torch.ones(2, 2)
    refused(
        "linear_grouped: .* groups of a power of two columns, not 6",
        "linear_grouped",
        torch.ones(1, 12),
        codes,
        scales,
        None,
        None,
        6,
    )
    inputs = list(SUITES["paged_attention"].make_inputs(SUITES["paged_attention"].cases[-1]))
    inputs[1] = inputs[1]._replace(keys=inputs[1].keys.transpose(2, 3))
    with pytest.raises(BackendError, match="paged_attention: backend triton reads contiguous pages"):
        SUITES["paged_attention"].call(*inputs, backend=Backend.TRITON)


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
def test_the_interpreter_still_converts_wrongly_to_bfloat16(numbers: Tensor) -> None:
    out = torch.zeros(16, dtype=torch.bfloat16)
    as_they_are_stored[(1,)](numbers, out)
    assert not torch.equal(out, numbers.to(torch.bfloat16))


def test_the_interpreter_is_still_wrong_in_bfloat16() -> None:
    """The day this fails, what `UPCAST` in compiled_kernels/triton_code/dots.py is for has gone, or a part of it, and
    the mended rows go from the table of gaps."""
    mended = {gap.operator for gap in GAPS if gap.reason == BF16_DOTS}
    assert mended == {"linear_int8", "linear_grouped", "expert_linear", "paged_attention", "quantized_attention"}
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(16, 16, generator=generator) for _ in range(2))
    for dtype, right in ((torch.float32, True), (torch.bfloat16, False)):
        out = torch.zeros(16, 16)
        bare_dot[(1,)](a.to(dtype), b.to(dtype), out)
        assert torch.allclose(out, a.to(dtype).float() @ b.to(dtype).float(), atol=1e-4) is right, dtype


@pytest.mark.parametrize("spans", [(1, 1, 1), (3, 1, 1)])
@pytest.mark.parametrize("mask", hidden_pages.MASKS)
@pytest.mark.parametrize("operator", ["paged_attention", "quantized_attention"])
def test_pages_that_a_mask_hides_are_not_read(operator: str, mask: str, spans: tuple[int, ...]) -> None:
    assert hidden_pages.problem(operator, Backend.TRITON, "causal", mask, spans, 1) is None
