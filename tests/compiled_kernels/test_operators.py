"""Every operator against its specification, computed in float64; unwritten memory is NaN."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import compiled_kernels
from compiled_kernels import Backend, backend_problems, cases
from compiled_kernels.agreement import disagreement
from compiled_kernels.cases import Case, CaseCost, suites
from compiled_kernels.check import verdict
from compiled_kernels.linear.matrix_format import MatrixFormat
from compiled_kernels.linear.quantize import (
    dequantize_grouped,
    dequantize_int8,
    dequantize_matrix,
    quantize_int4,
    quantize_int8,
    quantize_matrix,
)
from compiled_kernels.masks import AndMask, Causal, HeadMask, SlidingWindow
from compiled_kernels.paged_attention.cases import even, later_for_later_heads
from tests.thorough import tries

SUITES = {suite.operator: suite for suite in suites()}
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
ROWS = st.integers(1, 5)
seeds = st.integers(0, 2**31)


BANDS = st.one_of(st.just(Causal()), st.builds(SlidingWindow, st.integers(1, 6), st.integers(0, 2)))


def near_or_every_third(query, key):
    return (query - key < 4) | (key % 3 == 0)


def some_blocks(query, key):
    """Blocks of four keys by a hash of their numbers, as of BigBird."""
    return ((query // 4 * 2654435761 ^ key // 4 * 40503) % 2**32) % 3 == 0


MASKS = st.one_of(BANDS, st.builds(AndMask, BANDS, st.sampled_from([even, near_or_every_third, some_blocks])))


@st.composite
def attention(draw: st.DrawFn) -> dict:
    contexts = draw(st.lists(st.integers(1, 14), min_size=1, max_size=4))
    decode, groups, share = draw(st.booleans()), draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 3]))
    mask, sinks = draw(MASKS), draw(st.booleans())
    if draw(st.booleans()):
        mask = AndMask(mask, HeadMask(later_for_later_heads, groups * share))
    return {
        "contexts": contexts,
        "spans": [1 if decode else draw(st.integers(1, context)) for context in contexts],
        "num_kv_heads": groups,
        "queries_per_kv": share,
        "dim": draw(st.sampled_from([2, 8])),
        "size": draw(st.integers(1, 5)),
        "mask": mask,
        "softcap": draw(st.sampled_from([0.0, 1.5])),
        "sinks": sinks,
        "alibi": draw(st.booleans()),
        "sigmoid": not sinks and draw(st.booleans()),
        "selected": draw(st.sampled_from([1.0, 0.4])),
    }


@st.composite
def quantized(draw: st.DrawFn) -> dict:
    contexts = draw(st.lists(st.integers(1, 60), min_size=1, max_size=3))
    parts, first = draw(st.integers(1, 2)), draw(st.sampled_from([0, 0, 3, 9]))
    window = st.builds(SlidingWindow, st.integers(1, 30), st.integers(0, first))
    return {
        "contexts": contexts,
        "spans": [1] * len(contexts),  # spans compile their decodes: they have cases and laws of their own
        "formats": draw(st.sampled_from([("int8", "int8"), ("int4", "int4"), ("fp8", "fp8"), ("dense", "int4")])),
        "num_kv_heads": draw(st.sampled_from([1, 2])),
        "queries_per_kv": draw(st.sampled_from([1, 3, 5])),
        "dim": draw(st.sampled_from([8, 16])),
        "size": 8 * parts,
        "run": 8,
        "columns": draw(st.sampled_from([8, 64])),
        "lag": draw(st.integers(1, 20)),
        "first": first,
        "mask": draw(
            st.one_of(st.just(Causal()), window, st.builds(AndMask, window, st.sampled_from([even, some_blocks])))
        ),
        "softcap": draw(st.sampled_from([0.0, 1.5])),
        "sinks": draw(st.booleans()),
    }


def products(**more: st.SearchStrategy) -> st.SearchStrategy[dict]:
    widths = st.sampled_from([16, 48, 80])
    return st.fixed_dictionaries(
        {"tokens": ROWS, "width": widths, "out": st.integers(1, 40), "bias": st.booleans(), **more}
    )


@st.composite
def grouped_products(draw: st.DrawFn) -> dict:
    """Every kind of codes in groups of any size, the last of which may be partial, beside minima or without."""
    codes = draw(st.sampled_from(["int4", "int8", "fp8"]))
    types = st.sampled_from([torch.float16, torch.bfloat16, torch.float32])
    groups = [4, 16] if codes == "int4" else [4, 16, 32, 64, 1 << 16]
    return {
        **draw(products()), "tokens": draw(st.integers(1, 17)), "codes": codes, "group": draw(st.sampled_from(groups)),
        "scales": draw(types), "minima": None if codes == "fp8" else draw(st.none() | types),
    }  # fmt: skip


@st.composite
def expert_products(draw: st.DrawFn) -> dict:
    """Experts without rows, one that takes all, more experts than rows; weights in either layout, dense or codes."""
    panels, experts = draw(st.booleans()), draw(st.integers(1, 6))
    kind = draw(st.sampled_from(["dense", "int8", "int4", "mxfp4"]))
    sizes = {"dense": [0], "int8": [0, 8, 16], "int4": [8, 32] if panels else [2, 4, 16], "mxfp4": [32]}
    group = draw(st.sampled_from(sizes[kind]))
    step = {"dense": 4, "int8": 8}.get(kind, 16) if panels else 1
    width = math.lcm(step, group or 1) * draw(st.integers(1, 24 if not group else 4))
    out = 64 * draw(st.integers(1, 2)) if panels else draw(st.integers(1, 40))
    return {
        "kind": kind, "group": group,
        "rows": draw(st.integers(1, 24)), "experts": experts, "width": width, "out": out, "panels": panels,
        "bias": draw(st.booleans()), "named": draw(st.integers(1, experts)),
    }  # fmt: skip


VOCAB = st.integers(6, 400)
GATES = st.fixed_dictionaries({"tokens": ROWS, "hidden": st.integers(1, 140)})
ARGUMENTS: dict[str, st.SearchStrategy[dict]] = {
    "rms_norm": st.fixed_dictionaries({"tokens": ROWS, "width": st.integers(1, 140)}),
    "add_rms_norm": st.fixed_dictionaries({"tokens": ROWS, "width": st.integers(1, 140)}),
    "rotary": st.fixed_dictionaries(
        {"tokens": ROWS, "heads": ROWS, "dim": st.integers(1, 40).map(lambda half: 2 * half)}
    ),
    "gated_silu": GATES,
    "gated_gelu": GATES,
    "gated_clamped": GATES,
    "expert_linear": expert_products(),
    "linear": products(),
    "linear_int8": products(),
    "linear_grouped": grouped_products(),
    "linear_w8a8": products(),
    "kv_write": st.fixed_dictionaries(
        {"tokens": ROWS, "pages": st.integers(5, 7), "num_kv_heads": ROWS, "size": ROWS, "dim": st.integers(1, 9)}
    ),
    "paged_attention": attention(),
    "quantized_attention": quantized(),
    "log_softmax": st.fixed_dictionaries({"samples": ROWS, "vocab": VOCAB}),
    "top_logprobs": st.fixed_dictionaries({"samples": ROWS, "vocab": VOCAB, "count": st.integers(1, 6)}),
}


def test_every_operator_has_a_strategy() -> None:
    assert set(ARGUMENTS) == set(SUITES)


@pytest.mark.parametrize("backend", [Backend.EAGER, Backend.INDUCTOR])
@pytest.mark.parametrize("operator", list(SUITES))
@settings(max_examples=tries(25), deadline=None)
@given(data=st.data())
def test_any_shape_agrees_with_float64(operator: str, backend: Backend, data: st.DataObject) -> None:
    suite = SUITES[operator]
    dtype = torch.float32 if "vocab" in str(ARGUMENTS[operator]) else data.draw(DTYPES)
    arguments = data.draw(ARGUMENTS[operator]) | {"dtype": dtype}
    inputs = suite.input_maker(torch.Generator().manual_seed(data.draw(seeds)), **arguments)
    assert disagreement(suite, Case("drawn", arguments, CaseCost(0, 0)), inputs, backend) is None


@pytest.mark.parametrize("operator", list(SUITES))
def test_the_comparison_can_fail(operator: str) -> None:
    """A backend that is one part in a hundred off, or leaves its last number unwritten, is caught."""
    suite = SUITES[operator]
    case = suite.cases[0]
    assert verdict(suite, case, Backend.EAGER) == ("ok", "")
    for spoil in (
        lambda out: out * 1.01 + 0.01,
        lambda out: out.index_fill(-1, torch.tensor([out.shape[-1] - 1]), torch.nan),
    ):

        def spoiled(*inputs, backend, spoil=spoil):
            outputs = suite.call(*inputs, backend=backend)
            first, *rest = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
            return (first, *rest) if backend is Backend.EAGER else (spoil(first), *rest)

        wrong = replace(suite, call=spoiled, exact=suite.exact)
        assert disagreement(wrong, case, suite.make_inputs(case), Backend.INDUCTOR) is not None


WIDE = {
    "rms_norm": "16x576",
    "add_rms_norm": "16x576",
    "rotary": "16x9x64",
    "gated_silu": "16x1536",
    "gated_gelu": "16x5760",
    "gated_clamped": "16x5760",
    "expert_linear": "5 of 3 16x7",
    "quantized_attention": "decode 3 ragged int8",
    "linear": "2x64x40",
    "linear_int8": "2x64x40",
    "linear_grouped": "2x64x40 int4 by 32",
    "linear_w8a8": "3x128x7",
    "kv_write": "16x3x64",
    "paged_attention": "decode 3 ragged",
    "log_softmax": "3x257",
    "top_logprobs": "3x257 top 5",
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("operator", list(SUITES))
def test_one_row_that_is_off_is_caught(operator: str, dtype: str) -> None:
    """Among many right ones, and made as small as it may be: a row is held to its own size, not to the largest's."""
    suite = SUITES[operator]
    name = f"{WIDE[operator]} {dtype}"
    if name not in [case.name for case in suite.cases]:
        pytest.skip(f"{operator} has no case {name}: logits are float32")
    case = cases.case_of(suite, name)
    inputs = suite.make_inputs(case)
    if operator in ("gated_silu", "linear", "linear_int8", "linear_grouped"):
        inputs[0][1] *= 2.0**-10  # exact: the row's outputs are small, too

    def spoiled(*inputs, backend):
        outputs = suite.call(*inputs, backend=backend)
        first, *rest = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
        if backend is not Backend.EAGER:
            row = first.view(-1, first.shape[-1])
            at = int(row.isfinite().all(-1).nonzero()[1])
            place = int(row[at].abs().argmax())
            row[at, place] *= 1 + (1e-3 if dtype == "float32" else 0.05)
        return (first, *rest)

    wrong = replace(suite, call=spoiled, exact=suite.exact)
    found = disagreement(wrong, case, inputs, Backend.INDUCTOR)
    assert found is not None and "against float64" in found
    assert disagreement(suite, case, inputs, Backend.INDUCTOR) is None


def test_unwritten_memory_is_seen() -> None:
    suite = SUITES["rotary"]

    def leaves_a_row(x, cos, sin, backend):
        out = suite.call(x, cos, sin, backend=backend)
        if backend is Backend.EAGER:
            return out
        kept = torch.empty_like(out)
        kept[:-1] = out[:-1]
        return kept

    wrong = replace(suite, call=leaves_a_row, exact=suite.exact)
    case = cases.case_of(suite, "5x3x2 float32")
    assert "NaN" in str(disagreement(wrong, case, suite.make_inputs(case), Backend.INDUCTOR))
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("spoil", [torch.inf, -torch.inf])
def test_an_infinity_that_does_not_belong_is_reported(spoil: float) -> None:
    suite = SUITES["rotary"]
    case = cases.case_of(suite, "5x3x2 float32")
    wrong = suite.call(*suite.make_inputs(case), backend=Backend.EAGER)
    wrong[2, 1, 0] = spoil
    found = disagreement(suite, case, suite.make_inputs(case), Backend.INDUCTOR, lambda *_: wrong)
    assert found is not None and "inf where the specification has 0" in found


@pytest.mark.parametrize("name", ["decode window float32", "mixed window and sinks float32", "mixed float32"])
def test_attention_moves_what_is_seen_and_no_more(name: str) -> None:
    suite = SUITES["paged_attention"]
    case = cases.case_of(suite, name)
    of = case.arguments
    mask, heads = of.get("mask", Causal()), of["num_kv_heads"] * of["queries_per_kv"]
    looks, read = 0, 0
    for context, span in zip(of["contexts"], of["spans"], strict=True):
        pairs = [
            (query, key)
            for query in range(context - span, context)
            for key in range(context)
            if bool(mask(torch.tensor(query), torch.tensor(key)))
        ]
        looks, read = looks + len(pairs), read + len({key for _, key in pairs})
    assert case.cost.flops == 4 * looks * heads * of["dim"]
    assert case.cost.bytes == 4 * of["dim"] * (2 * read * of["num_kv_heads"] + 2 * sum(of["spans"]) * heads)


@settings(max_examples=tries(40), deadline=None)
@given(seeds, st.integers(1, 5), st.integers(1, 5), st.sampled_from([2, 4, 32]), st.sampled_from([1e-3, 1.0, 50.0]))
def test_quantized_weights_stay_within_half_a_step(seed: int, out: int, groups: int, group: int, scale: float) -> None:
    weight = torch.randn(out, groups * group, generator=torch.Generator().manual_seed(seed)) * scale
    values, scales = quantize_int8(weight)
    assert ((weight - dequantize_int8(values, scales)).abs() <= scales[:, None] * 0.5001).all()
    packed, steps = quantize_int4(weight, group)
    assert packed.numel() * 2 == weight.numel()
    away = (weight - dequantize_grouped(packed, steps, None, group)).abs().view(out, groups, group)
    # +8 steps have no code: the far end of the other sign is cut to 7. float16 scales add a part in 2,048.
    assert (away <= steps.float().abs()[..., None] * 1.01).all()
    # Within half a step are all others: at least one of each two, since a group of two may have one of each end.
    assert (away <= steps.float().abs()[..., None] * 0.51).float().mean() >= 0.5


@settings(max_examples=tries(40), deadline=None)
@given(seeds, st.integers(1, 5), st.integers(1, 70), grouped_products(), st.sampled_from([1e-3, 1.0, 50.0]))
def test_any_format_stays_within_half_a_step(seed: int, out: int, width: int, drawn: dict, size: float) -> None:
    """Half a step of a code, or of E4M3 its 4 binary digits, and what scales and minima lose in their types."""
    codes, group = drawn["codes"], min(drawn["group"], 64)
    width = 16 * width if codes == "int4" else width
    format = MatrixFormat(codes, group, drawn["scales"], drawn["minima"])
    weight = torch.randn(out, width, generator=torch.Generator().manual_seed(seed)) * size + size / 3
    stored = quantize_matrix(weight, format)
    for tensor, (shape, dtype) in zip(stored, format.storage(out, width).values(), strict=True):
        assert tensor.shape == shape and tensor.dtype == dtype
    assert sum(tensor.nbytes for tensor in stored) == format.nbytes(out, width)
    scales = stored[1].double().abs().repeat_interleave(group, 1)[:, :width]
    ours = codes == "int4" and format == MatrixFormat("int4", group, torch.float16)  # whose far end is cut
    eps = max(torch.finfo(each).eps for each in (format.scales, format.minima or torch.float32))
    relative = 2**-4 if codes == "fp8" else 0
    step = scales * (2**-9 if codes == "fp8" else 1.01 if ours else 0.51) + weight.abs() * relative
    lost = (16 if codes == "int4" else 256) * scales * eps + size * 8 * eps
    assert ((dequantize_matrix(format, *stored) - weight).abs() <= step + lost).all()


HOSTILE = {torch.float16: [0.0, 2.0**-24, 65504.0], torch.float32: [0.0, 1e-45, 1e-38, 3e30]}


@pytest.mark.parametrize("backend", [Backend.INDUCTOR, Backend.MLIR])
@pytest.mark.parametrize("codes", ["int4", "int8", "fp8"])
@pytest.mark.parametrize("dtype", HOSTILE)
def test_hostile_scales(codes: str, dtype: torch.dtype, backend: Backend) -> None:
    """Zero, the least and the largest: and all codes."""
    if problem := backend_problems()[backend]:
        pytest.skip(f"backend {backend}: {problem}")
    octets = torch.arange(256, dtype=torch.uint8)[None].repeat(len(HOSTILE[dtype]), 1)
    octets[:, (octets[0] & 127) == 127] = 0  # NaN of E4M3
    stored = octets if codes == "int4" else octets.view({"int8": torch.int8, "fp8": torch.float8_e4m3fn}[codes])
    scales = torch.tensor(HOSTILE[dtype], dtype=dtype)[:, None].repeat(1, 4)
    width = 512 if codes == "int4" else 256
    x = torch.eye(width)[:: width // 64]  # single columns: each output is one code times its scale
    inputs = (x, stored, scales, None, None, width // 4)
    ours = compiled_kernels.linear_grouped(*inputs, backend=backend)
    exact = compiled_kernels.linear_grouped(x.double(), stored, scales.double(), *inputs[3:])
    torch.testing.assert_close(ours.double(), exact, rtol=1e-6, atol=2.0**-126)


def test_int4_packing_is_exact() -> None:
    values = torch.arange(-8, 8).repeat(4)[None].float()  # 64 columns hold every code
    packed, scales = quantize_int4(values * 0.5, group=32)
    assert torch.equal(dequantize_grouped(packed, scales, None, 32), values * 0.5)


class Nowhere:
    def __call__(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key < 0) & (query < 0)


def decode_inputs(data: st.DataObject) -> list:
    drawn = data.draw(attention())
    arguments = drawn | {"dtype": torch.float32, "spans": [1] * len(drawn["contexts"])}
    generator = torch.Generator().manual_seed(data.draw(seeds))
    return list(SUITES["paged_attention"].input_maker(generator, **arguments))


@pytest.mark.parametrize("backend", [Backend.EAGER, Backend.INDUCTOR])
@settings(max_examples=tries(10), deadline=None)
@given(data=st.data())
def test_a_row_that_may_look_nowhere_gives_zeros(data: st.DataObject, backend: Backend) -> None:
    inputs = decode_inputs(data)
    inputs[3] = inputs[3]._replace(mask=Nowhere())
    out = SUITES["paged_attention"].call(*inputs, backend=backend)
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("backend", [Backend.EAGER, Backend.INDUCTOR])
@settings(max_examples=tries(10), deadline=None)
@given(data=st.data())
def test_nan_stays_with_its_row(data: st.DataObject, backend: Backend) -> None:
    inputs = decode_inputs(data)
    clean = SUITES["paged_attention"].call(*inputs, backend=backend)
    inputs[0][0] = torch.nan
    out = SUITES["paged_attention"].call(*inputs, backend=backend)
    # A head that sees no key (of the pages it reads) gives zeros, whatever the query is.
    assert torch.equal(out[0].isnan(), clean[0] != 0)
    assert torch.equal(out[1:], clean[1:])


def test_cases_of_one_operator_have_different_names() -> None:
    for suite in SUITES.values():
        names = [case.name for case in suite.cases]
        assert len(set(names)) == len(names), suite.operator
    assert {suite.operator for suite in cases.suites()} <= set(compiled_kernels.__all__)
