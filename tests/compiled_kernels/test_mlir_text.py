"""Kernels written as MLIR text: any shape, on every kind of processor, in any number of threads."""

from __future__ import annotations

import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_kernels import Lane, LaneError, lane_problems
from compiled_kernels.cases import Case, Work, disagreement
from compiled_kernels.gaps import known_gap
from compiled_kernels.mlir_text import Lines, Target, divisor, number
from tests.compiled_kernels.test_operators import ARGUMENTS, DTYPES, SUITES, seeds

problem = lane_problems()[Lane.MLIR]
needs_mlir = pytest.mark.skipif(problem is not None, reason=f"lane mlir: {problem}")

WRITTEN = {
    "linear": "compiled_kernels.linear.mlir",
    "linear_int8": "compiled_kernels.linear.mlir",
    "linear_int4": "compiled_kernels.linear.mlir",
    "kv_write": "compiled_kernels.kv_write.mlir",
    "paged_attention": "compiled_kernels.paged_attention.mlir",
}
HERE = Target.here()
MACHINES = [(HERE, 1), (HERE, 3), (Target(lanes=8), 2), (Target(lanes=16), 2)]  # processors, and threads


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@needs_mlir
@pytest.mark.parametrize("operator", list(WRITTEN))
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_shape_agrees_with_float64(operator: str, data: st.DataObject) -> None:
    arguments = data.draw(ARGUMENTS[operator]) | {"dtype": data.draw(DTYPES)}
    inputs = SUITES[operator].inputs(torch.Generator().manual_seed(data.draw(seeds)), **arguments)
    assert disagreement(SUITES[operator], Case("drawn", arguments, Work(0, 0)), inputs, Lane.MLIR) is None


@needs_mlir
@pytest.mark.parametrize(("target", "threads_used"), MACHINES, ids=str)
@pytest.mark.parametrize("operator", ["linear", "linear_int8", "linear_int4", "paged_attention"])
def test_every_kind_of_processor(
    operator: str, target: Target, threads_used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dot products of pairs and without, split among threads in any way; the shapes are those of models."""
    module = importlib.import_module(WRITTEN[operator])
    torch.set_num_threads(threads_used)
    monkeypatch.setattr(module.Target, "here", lambda: target)
    for kept in (module._compiled, getattr(module, "_compiled_spans", module._compiled)):
        kept.cache_clear()
    suite = SUITES[operator]
    for case in suite.cases:
        if case.work.flops < 1e7 and not known_gap(operator, Lane.MLIR, case.name):
            assert disagreement(suite, case, suite.make(case), Lane.MLIR) is None, case.name
    for kept in (module._compiled, getattr(module, "_compiled_spans", module._compiled)):
        kept.cache_clear()


@needs_mlir
@pytest.mark.parametrize("operator", ["linear", "linear_int8", "linear_int4", "paged_attention", "kv_write"])
def test_torch_knows_the_form(operator: str) -> None:
    """Schema, fake implementation and dispatch are right, and one graph holds the operation at the first call."""
    suite = SUITES[operator]
    case = next(case for case in suite.cases if "mixed" in case.name or case.work.flops < 1e5)
    inputs = suite.make(case)
    form = getattr(torch.ops.compiled_kernels, f"{operator}_mlir").default
    if operator == "paged_attention":
        *given_, mask, decode_only, softcap, sinks, score = inputs
        arguments = (*given_, 0, 0, decode_only, softcap, sinks, score is not None)
    else:
        arguments = inputs
    torch.library.opcheck(form, arguments, test_utils=("test_schema", "test_faketensor"))
    whole = torch.compile(lambda *values: suite.call(*values, lane=Lane.MLIR), fullgraph=True, backend="eager")
    assert torch.equal(whole(*inputs).nan_to_num(7.0), suite.call(*inputs, lane=Lane.MLIR).nan_to_num(7.0))


@needs_mlir
def test_types_it_does_not_know_are_refused() -> None:
    suite = SUITES["linear"]
    x, weight, bias = suite.make(suite.cases[-2])
    with pytest.raises(LaneError, match="float32 and bfloat16, not torch.float64 and"):
        suite.call(x.double(), weight.double(), bias, lane=Lane.MLIR)
    with pytest.raises(LaneError, match="one of float32 and bfloat16"):
        attention = SUITES["paged_attention"]
        inputs = list(attention.make(attention.cases[-1]))
        inputs[0] = inputs[0].half()
        attention.call(*inputs, lane=Lane.MLIR)


@given(st.integers(1, 4096), st.sampled_from([1, 2, 4, 8, 16, 32, 64]))
def test_divisor(count: int, most: int) -> None:
    found = divisor(count, most)
    assert count % found == 0 and found <= most
    assert found == most or count % (2 * found) != 0


@given(st.floats(-(2.0**90), 2.0**90, width=32))
def test_numbers_are_read_back(value: float) -> None:
    assert "." in number(value)
    assert torch.tensor(float(number(value))) == torch.tensor(value)


@needs_mlir
@pytest.mark.parametrize("lanes", [2, 4, 8, 16])
def test_folded_totals_are_the_sums(lanes: int) -> None:
    """totals() by its own lines, carried out in torch."""
    lines = Lines()
    vectors = torch.randn(lanes, lanes, dtype=torch.float64)
    values = {f"%x{i}": vectors[i] for i in range(lanes)}
    result = lines.totals(list(values), lanes)
    for line in lines.lines:
        name, expression = line.split(" = ", 1)
        if expression.startswith("vector.shuffle"):
            left, right, *_ = expression.removeprefix("vector.shuffle ").split(" ")
            picked = [int(i) for i in expression[expression.index("[") + 1 : expression.index("]")].split(",")]
            values[name] = torch.cat([values[left.rstrip(",")], values[right]])[picked]
        else:
            left, right = expression.removeprefix("arith.addf ").split(" : ")[0].split(", ")
            values[name] = values[left] + values[right]
    assert torch.allclose(values[result], vectors.sum(dim=1))
