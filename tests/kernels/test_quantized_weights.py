"""Weights in few bits: within half a step of their numbers, exact where they can be, right at any scale."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from threading import Thread
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

import compiled_kernels
from compiled_kernels import Backend
from compiled_kernels.linear import by_blocks
from compiled_kernels.linear.cases import GROUPED, NAMED
from compiled_kernels.linear.matrix_format import INT8_MATRIX, MatrixFormat
from compiled_kernels.linear.quantize import (
    dequantize_matrix,
    quantize_int4,
    quantize_matrix,
)
from compiled_kernels.threads import in_threads
from tests.helpers.kernels import needs_mlir, on_threads
from tests.thorough import tries

SEEDS = st.integers(0, 2**31)
SIZES = st.sampled_from([1e-3, 1.0, 50.0])


@st.composite
def formats(draw: st.DrawFn) -> MatrixFormat:
    """Every kind of codes in groups of any size, beside minima or without."""
    codes = draw(st.sampled_from(["int4", "int8", "fp8"]))
    types = st.sampled_from([torch.float16, torch.bfloat16, torch.float32])
    if codes == "int8" and draw(st.booleans()):
        return INT8_MATRIX
    group = draw(st.sampled_from([8, 16, 24] if codes == "int4" else [4, 16, 32, 64]))
    return MatrixFormat(codes, group, draw(types), None if codes == "fp8" else draw(st.none() | types))


@settings(max_examples=tries(40))
@given(SEEDS, st.integers(1, 5), st.integers(1, 70), formats(), SIZES)
def test_any_format_stays_within_half_a_step(
    seed: int, out: int, width: int, format: MatrixFormat, size: float
) -> None:
    """Half a step of a code, or of E4M3 its 4 binary digits, and what scales and minima lose in their types; the last
    group may be partial."""
    codes, group = format.codes, format.group or width
    width = 48 * width if codes == "int4" else width
    weight = torch.randn(out, width, generator=torch.Generator().manual_seed(seed)) * size + size / 3
    stored = quantize_matrix(weight, format)
    for tensor, (shape, dtype) in zip(stored, format.storage(out, width).values(), strict=True):
        assert tensor.shape == shape and tensor.dtype == dtype
    assert sum(tensor.nbytes for tensor in stored) == format.nbytes(out, width)
    scales = stored[1].double().abs().view(out, -1).repeat_interleave(group, 1)[:, :width]
    cut = codes == "int4" and format == MatrixFormat("int4", group, torch.float16)  # the far end of our own
    eps = max(torch.finfo(each).eps for each in (format.scales, format.minima or torch.float32))
    relative = 2**-4 if codes == "fp8" else 0
    step = scales * (2**-9 if codes == "fp8" else 1.01 if cut else 0.51) + weight.abs() * relative
    lost = (16 if codes == "int4" else 256) * scales * eps + size * 8 * eps
    away = (dequantize_matrix(format, *stored) - weight).abs()
    assert (away <= step + lost).all()
    # The far end of the other sign has no code: of each two numbers one may be as far away as a step.
    assert not cut or (away <= step / 2 + lost).float().mean() >= 0.5


HOSTILE = {torch.float16: [0.0, 2.0**-24, 65504.0], torch.float32: [0.0, 1e-45, 1e-38, 3e30]}


@pytest.mark.parametrize("backend", [Backend.INDUCTOR, pytest.param(Backend.MLIR, marks=needs_mlir)])
@pytest.mark.parametrize("codes", ["int4", "int8", "fp8"])
@pytest.mark.parametrize("dtype", HOSTILE)
def test_hostile_scales(codes: str, dtype: torch.dtype, backend: Backend) -> None:
    """Zero, the least and the largest: and all codes."""
    octets = torch.arange(256, dtype=torch.uint8)[None].repeat(len(HOSTILE[dtype]), 1)
    octets[:, (octets[0] & 127) == 127] = 0  # NaN of E4M3
    stored = octets.view({"int4": torch.int32, "int8": torch.int8, "fp8": torch.float8_e4m3fn}[codes])
    scales = torch.tensor(HOSTILE[dtype], dtype=dtype)[:, None].repeat(1, 4)
    width = 512 if codes == "int4" else 256
    x = torch.eye(width)[:: width // 64]  # single columns: each output is one code times its scale
    rest = None, None, codes, width // 4
    found = compiled_kernels.linear_quantized(x, stored, scales, *rest, backend=backend)
    exact = compiled_kernels.linear_quantized(x.double(), stored, scales.double(), *rest)
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=2.0**-126)


def test_blocks_in_threads_have_the_bits_of_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_blocks, "BLOCK_VALUES", 256)
    x = torch.randn(3, 64)
    weight, scales, minima = quantize_matrix(torch.randn(50, 64), MatrixFormat.named("q5_1"))
    plain = compiled_kernels.linear_quantized(x, weight, scales, minima, None, "q5_1")
    with on_threads(4):
        with torch.inference_mode():
            found = compiled_kernels.linear_quantized(x, weight, scales, minima, None, "q5_1")
        assert torch.equal(found, plain)
        assert torch.get_num_threads() == 4


def test_threads_that_begin_beside_work_in_threads_have_all_of_torchs() -> None:
    began: list[int] = []

    def work(item: int) -> int:
        if item == 0:  # torch's setting is a new thread's own from its first use on
            other = Thread(target=lambda: began.append(torch.get_num_threads()))
            other.start()
            other.join()
        return torch.get_num_threads()

    with on_threads(3):
        assert in_threads(work, range(5)) == [1] * 5
        assert began == [3] and torch.get_num_threads() == 3


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_work_in_threads_has_its_callers_modes(mode: Callable[[], AbstractContextManager[None]]) -> None:
    def modes(_: int) -> tuple[bool, bool]:
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    with on_threads(2), mode():
        assert in_threads(modes, range(3)) == [modes(0)] * 3
    assert in_threads(modes, ()) == []


def test_int4_packing_is_exact() -> None:
    values = torch.arange(-8, 8).repeat(4)[None].float()  # 64 columns hold every code
    packed, scales = quantize_int4(values * 0.5, group=32)
    assert torch.equal(dequantize_matrix(MatrixFormat("int4", 32, torch.float16), packed, scales), values * 0.5)


@pytest.mark.parametrize("backend", [Backend.EAGER, Backend.INDUCTOR])
def test_a_product_dequantizes_by_block(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """No allocation of a product of several rows is as large as its matrix, in whatever format that is."""
    monkeypatch.setattr(by_blocks, "BLOCK_VALUES", 4096)
    monkeypatch.setattr(by_blocks, "in_threads", map)  # the profiler sees its own thread alone
    width, out, x = 512, 128, torch.randn(3, 512)
    weight, products = torch.randn(out, width), []
    for format in (INT8_MATRIX, *GROUPED, *NAMED):
        stored = quantize_matrix(weight, format)
        given = x, *stored, *[None] * (4 - len(stored)), format.codes, format.group
        products.append(partial(compiled_kernels.linear_quantized, *given, backend=backend))
    given = x, *quantize_matrix(weight, INT8_MATRIX), None, None, "int8", 0, "int8"
    products.append(partial(compiled_kernels.linear_quantized, *given, backend=backend))
    multiply = torch.compile(lambda: [run() for run in products]) if backend is Backend.INDUCTOR else None
    multiply = multiply or (lambda: [run() for run in products])
    with torch.inference_mode():
        multiply()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            multiply()
    trace: Any = seen.profiler
    sizes = [each.nbytes() for each in trace.kineto_results.events() if each.name() == "[memory]"]
    assert 4 * by_blocks.BLOCK_VALUES <= max(sizes) <= 8 * by_blocks.BLOCK_VALUES < 2 * weight.numel()
