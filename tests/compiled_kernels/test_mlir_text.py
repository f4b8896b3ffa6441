"""Kernels written as MLIR text: any shape, at every level of the instruction set, in any number of threads. Unwritten
memory is NaN (see `disagreement`)."""

from __future__ import annotations

import importlib
from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_kernels import Backend, BackendError, backend_problems
from compiled_kernels.agreement import disagreement
from compiled_kernels.capabilities import known_gap
from compiled_kernels.cases import Case, CaseCost
from compiled_kernels.level import Level, available_levels, limited_to
from compiled_kernels.linear.cases import GROUPED
from compiled_kernels.mlir_text import Lines, largest_divisor, number
from compiled_kernels.paged_attention.api import flatten
from tests.compiled_kernels.test_operators import ARGUMENTS, DTYPES, SUITES, seeds
from tests.thorough import some, tries

problem = backend_problems()[Backend.MLIR]
needs_mlir = pytest.mark.skipif(problem is not None, reason=f"backend mlir: {problem}")

WRITTEN = {
    "linear": "compiled_kernels.linear.mlir",
    "linear_int8": "compiled_kernels.linear.mlir",
    "linear_grouped": "compiled_kernels.linear.mlir",
    "kv_write": "compiled_kernels.kv_write.mlir",
    "paged_attention": "compiled_kernels.paged_attention.mlir",
}
THREADS = {Level.V3: 2, Level.V4: 1, Level.V4_VNNI: 2, Level.V4_BF16: 3}  # one number for each level: all are tried


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@needs_mlir
@pytest.mark.parametrize("operator", list(WRITTEN))
@settings(max_examples=tries(12), deadline=None)
@given(data=st.data())
def test_any_shape_agrees_with_float64(operator: str, data: st.DataObject) -> None:
    arguments = data.draw(ARGUMENTS[operator]) | {"dtype": data.draw(DTYPES)}
    inputs = SUITES[operator].input_maker(torch.Generator().manual_seed(data.draw(seeds)), **arguments)
    assert disagreement(SUITES[operator], Case("drawn", arguments, CaseCost(0, 0)), inputs, Backend.MLIR) is None


@needs_mlir
@pytest.mark.parametrize("tokens", [1, 6])
@pytest.mark.parametrize("name", GROUPED)
def test_every_format_of_codes(name: str, tokens: int) -> None:
    """Also where the last group has fewer columns; one token, and a run that begins within another."""
    format, suite = GROUPED[name], SUITES["linear_grouped"]
    width = 192 if format.codes == "int4" else 176
    for dtype in (torch.float32, torch.bfloat16):
        shape = {"tokens": tokens, "width": width, "out": 9, "dtype": dtype, "bias": dtype == torch.float32}
        arguments = {**shape, **{field.name: getattr(format, field.name) for field in fields(format)}}
        inputs = suite.input_maker(torch.Generator().manual_seed(tokens), **arguments)
        assert disagreement(suite, Case("drawn", arguments, CaseCost(0, 0)), inputs, Backend.MLIR) is None


@pytest.mark.sampled(8)
@needs_mlir
@pytest.mark.parametrize("level", available_levels(), ids=str)
@pytest.mark.parametrize("operator", [*WRITTEN, "quantized_attention"])
def test_every_level(operator: str, level: Level) -> None:
    """With dot products of pairs and of bytes and without, split among threads in any way; the shapes are those of
    models."""
    torch.set_num_threads(THREADS[level])
    suite = SUITES[operator]
    with limited_to(level):
        small = [case for case in suite.cases if case.cost.flops < 1e7]
        for case in some([case for case in small if not known_gap(operator, Backend.MLIR, case.name)], 8):
            assert disagreement(suite, case, suite.make_inputs(case), Backend.MLIR) is None, case.name


@needs_mlir
@pytest.mark.parametrize("operator", ["linear", "linear_int8", "linear_grouped", "paged_attention", "kv_write"])
def test_torch_knows_the_form(operator: str) -> None:
    """Schema, fake implementation and dispatch are right, and one graph holds the operation at the first call."""
    suite = SUITES[operator]
    case = next(case for case in suite.cases if "mixed" in case.name or case.cost.flops < 1e5)
    inputs = suite.make_inputs(case)
    form = getattr(torch.ops.compiled_kernels, f"{operator}_mlir").default
    if operator == "paged_attention":
        q, kv, spans, parameters = inputs
        arguments = (q, *kv.flat, *flatten(spans, parameters, operator, Backend.MLIR))
    else:
        arguments = inputs
    torch.library.opcheck(form, arguments, test_utils=("test_schema", "test_faketensor"))
    whole = torch.compile(lambda *values: suite.call(*values, backend=Backend.MLIR), fullgraph=True, backend="eager")
    assert torch.equal(whole(*inputs).nan_to_num(7.0), suite.call(*inputs, backend=Backend.MLIR).nan_to_num(7.0))


@needs_mlir
def test_types_it_does_not_know_are_refused() -> None:
    suite = SUITES["linear"]
    x, weight, bias = suite.make_inputs(suite.cases[-2])
    with pytest.raises(BackendError, match="float32 or bfloat16 on the CPU; .* float64 on cpu given"):
        suite.call(x.double(), weight.double(), bias, backend=Backend.MLIR)
    with pytest.raises(BackendError, match="q as .* float32 or bfloat16"):
        attention = SUITES["paged_attention"]
        inputs = list(attention.make_inputs(attention.cases[-1]))
        inputs[0] = inputs[0].half()
        attention.call(*inputs, backend=Backend.MLIR)


@needs_mlir
@pytest.mark.parametrize("operator", ["linear", "linear_int8", "linear_grouped"])
def test_new_numbers_of_rows_stop_compiling(operator: str) -> None:
    """One function for each number below four, one for all others; and it stays a function of a few hundred lines."""
    compiled = importlib.import_module(WRITTEN[operator])._compiled
    suite = SUITES[operator]
    more = (
        {"codes": "int4", "group": 16, "scales": torch.float16, "minima": None} if operator == "linear_grouped" else {}
    )
    before = compiled.cache_info().misses
    for tokens in (1, 2, 3, 4, 5, 6, 7, 8, 9, 31, 130, 513, 0):
        arguments = {"tokens": tokens, "width": 48, "out": 11, "dtype": torch.bfloat16, "bias": True, **more}
        inputs = suite.input_maker(torch.Generator().manual_seed(tokens), **arguments)
        assert disagreement(suite, Case("drawn", arguments, CaseCost(0, 0)), inputs, Backend.MLIR) is None, tokens
    assert compiled.cache_info().misses - before == 4
    arguments = {"tokens": 513, "width": 48, "out": 11, "dtype": torch.bfloat16, "bias": True, **more}
    shown = importlib.import_module(WRITTEN[operator]).stages(Case("drawn", arguments, CaseCost(0, 0)), operator)
    assert shown["vector"].count("\n") < 600


@given(st.integers(1, 4096), st.sampled_from([1, 2, 4, 8, 16, 32, 64]))
def test_divisor(count: int, most: int) -> None:
    found = largest_divisor(count, most)
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
    result = lines.hsums(list(values), lanes)
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
