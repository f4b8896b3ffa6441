"""The MLIR text of the kernels compiled for AArch64, where it is portable, and named where it is not."""

from __future__ import annotations

import importlib
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiled_kernels.agreement import disagreement
from compiled_kernels.backends import Backend, backend_problems
from compiled_kernels.builder.functions import text_of
from compiled_kernels.capabilities import known_gap
from compiled_kernels.cases import Case, suite_of
from compiled_kernels.level import Level, limited_to
from compiled_kernels.linear.matrix_format import DENSE_MATRIX
from compiled_kernels.mlir import ahead
from compiled_kernels.mlir.ahead import constants_by_bits
from compiled_kernels.mlir.show import stages
from compiled_kernels.paged_attention import mlir as paged_attention
from tests.helpers import emulated
from tests.helpers.refusals import kernel_refuses
from tests.kernels.small_kernels import CALLS_MISSING_FUNCTION, small_step

problem = backend_problems()[Backend.MLIR] or ahead.unavailable_reason()
needs_llvm = pytest.mark.skipif(problem is not None, reason=f"ahead of time: {problem}")
lacking = problem or emulated.missing()
needs_emulator = pytest.mark.skipif(lacking is not None, reason=f"AArch64 code cannot run: {lacking}")
OPERATORS = (
    "rms_norm", "add_rms_norm", "rotary", "gated_silu", "gated_gelu", "gated_clamped", "linear",
    "linear_quantized", "kv_write", "paged_attention", "quantized_attention", "log_softmax",
)  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16)
AARCH64 = 183  # e_machine of ELF


@needs_llvm
@pytest.mark.levels
@pytest.mark.sampled(5)
@pytest.mark.parametrize("operator", OPERATORS)
def test_text_without_x86s_instructions_is_portable(operator: str) -> None:
    rows = list(ahead.portable_kernels(operator))
    assert {row.level for row in rows} >= {"v3"}
    for row in rows:
        if row.level in ("v3", "v4"):
            assert (row.status, row.reason) == ("portable", "")
        assert row.status != "failed", row
        assert (row.status == "x86") == row.reason.startswith("names llvm.x86."), row


@needs_llvm
def test_a_whole_decode_step_is_portable() -> None:
    text = small_step(Level.V3).kernel.stages["vector"]
    made = ahead.compile_ahead(text)
    assert made.code[:4] == b"\x7fELF" and struct.unpack_from("<H", made.code, 18) == (AARCH64,)
    assert "fmla\tv" in made.assembly and set(made.calls) <= ahead.PROVIDED


@needs_llvm
def test_what_is_x86s_alone_is_refused_by_name() -> None:
    words = "vector<16xf32>, vector<32xbf16>, vector<32xbf16>"
    text = f"""func.func @f(%a: vector<16xf32>, %b: vector<32xbf16>) -> vector<16xf32> {{
%c = llvm.call_intrinsic "llvm.x86.avx512bf16.dpbf16ps.512"(%a, %b, %b) : ({words}) -> vector<16xf32>
return %c : vector<16xf32>
}}"""
    kernel_refuses(r"names llvm\.x86\.avx512bf16\.dpbf16ps\.512, which only x86 has", ahead.compile_ahead, text)


@needs_llvm
def test_a_call_is_among_the_calls() -> None:
    assert ahead.compile_ahead(CALLS_MISSING_FUNCTION).calls == ("missing_function",)


def test_without_llvmlite_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    if backend_problems()[Backend.MLIR]:
        pytest.skip(f"backend mlir: {backend_problems()[Backend.MLIR]}")
    monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
    kernel_refuses("pip install llvmlite", lambda: next(ahead.portable_kernels("rms_norm")))


@given(st.integers(0, 2**32 - 1), st.booleans())
def test_constants_keep_their_bits(bits: int, as_bits: bool) -> None:
    value = numpy.array([bits], numpy.uint32).view(numpy.float32)[0]
    if not numpy.isfinite(value):
        as_bits = True
    number = f"f0x{bits:08X}" if as_bits else numpy.format_float_scientific(value, trim="0", exp_digits=2)
    line = constants_by_bits(f"  %1 = fadd float %0, {number}")
    head, _, written = line.rpartition(" ")
    assert head == "  %1 = fadd float %0,"
    double = struct.unpack("<d", struct.pack("<Q", int(written, 16)))[0]
    if numpy.isnan(value):
        assert numpy.isnan(double)
    else:
        assert numpy.array([double]).astype(numpy.float32).view(numpy.uint32)[0] == bits


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("store float -inf, ptr %35, align 4", "store float 0xFFF0000000000000, ptr %35, align 4"),
        ("%4 = fmul <8 x float> %3, splat (float f0x3FB8AA3B)",
         "%4 = fmul <8 x float> %3, splat (float 0x3FF7154760000000)"),
        ("%4 = fptrunc <2 x double> <double 1.5, double 2.5> to <2 x float>",
         "%4 = fptrunc <2 x double> <double 0x3FF8000000000000, double 0x4004000000000000> to <2 x float>"),
        ("store bfloat f0x3F80, ptr %1", "store bfloat 0xR3F80, ptr %1"),
        ("store half 1.0, ptr %1", "store half 0xH3C00, ptr %1"),
        ("%5 = phi float [ 0.0, %3 ], [ %6, %4 ]", "%5 = phi float [ 0x0000000000000000, %3 ], [ %6, %4 ]"),
        ("%8 = call float @llvm.fma.f32(float %5, float %6, float 1.0)",
         "%8 = call float @llvm.fma.f32(float %5, float %6, float 0x3FF0000000000000)"),
        ("store i32 7, ptr %1, align 4", "store i32 7, ptr %1, align 4"),
    ],
)  # fmt: skip
def test_constants_of_every_form(line: str, wanted: str) -> None:
    assert constants_by_bits(line) == wanted


MAX_FLOPS = 1_000_000  # so that an emulated case takes about a second
# Rows beyond a tile, ragged contexts, windows, spans of several tokens; in bfloat16, which AArch64 rounds by integers.
RUN = [
    (operator, case)
    for operator in ("linear", "linear_quantized", "kv_write", "paged_attention", "quantized_attention")
    for case in suite_of(operator).cases
    if case.arguments["dtype"] is torch.bfloat16 and not case.timed and case.cost.flops < MAX_FLOPS
    if not case.arguments.get("panels") and known_gap(operator, Backend.MLIR, case.name) is None
    # Words and INT8 activations are multiplied by instructions that x86 alone has.
    if "activations" not in case.arguments and case.arguments.get("format", DENSE_MATRIX).words is None
]


@contextmanager
def nothing_remembered(*modules: ModuleType) -> Iterator[None]:
    """Kernels that modules have compiled are forgotten before and after."""
    own = [each for one in modules for each in vars(one).values() if getattr(each, "__module__", "") == one.__name__]
    caches = [each for each in own if hasattr(each, "cache_clear")]
    assert caches
    for cache in caches:
        cache.cache_clear()
    try:
        yield
    finally:
        for cache in caches:
            cache.cache_clear()


@pytest.mark.levels
@pytest.mark.sampled(25)
@needs_emulator
@pytest.mark.parametrize(("operator", "case"), RUN, ids=[f"{operator} {case.name}" for operator, case in RUN])
def test_kernels_are_right_on_aarch64(
    operator: str, case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = suite_of(operator)
    package = suite.input_maker.__module__.rpartition(".")[0]
    module = importlib.import_module(f"{package}.mlir")
    kernel = {"compile_entry": lambda name, _, emit: emulated.Emulated(tmp_path, text_of(emit), name)}
    for each in (module, paged_attention):  # whose kernels and calls quantized_attention shares
        for name, changed in (kernel | {"BoundCall": emulated.call}).items():
            monkeypatch.setattr(each, name, changed, raising=each is not module)
    with limited_to(Level.V3), nothing_remembered(module, paged_attention):
        assert disagreement(suite, case, suite.make_inputs(case), Backend.MLIR) is None


@pytest.mark.levels
@needs_emulator
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("log_softmax", torch.float32), *((name, dtype) for name in ("rms_norm", "gated_silu") for dtype in DTYPES)],
)
def test_what_torch_mlir_lowers_is_right_on_aarch64(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    suite = suite_of(name)
    case = next(each for each in suite.cases if each.arguments["dtype"] is dtype)
    with limited_to(Level.V3):
        made = stages(name, case)
    program = emulated.Emulated(tmp_path, made.stages["bufferized"], name, "bufferized")

    def on_aarch64(*inputs: object) -> torch.Tensor:
        out = suite.call(*inputs, backend=Backend.EAGER)
        given = [each.contiguous() for each in inputs if isinstance(each, torch.Tensor)]
        mine = torch.full_like(out, torch.nan)
        program.run([*given, mine], threads=1)
        return mine

    assert disagreement(suite, case, suite.make_inputs(case), Backend.MLIR, on_aarch64) is None
