"""Levels of the instruction set: compiled code keeps to its level, rounds alike at all of them, and hides nothing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiled_kernels.builder.target import memref
from compiled_kernels.cases import case_of, suite_of
from compiled_kernels.level import Level, available_levels, current_level, level_of, limited_to
from compiled_kernels.mlir import compile_text
from compiled_kernels.mlir.execute import Kernel
from compiled_kernels.mlir.show import stages
from tests.helpers.kernels import needs_mlir
from tests.helpers.levels import at_executed_levels, levels
from tests.helpers.refusals import kernel_refuses
from tests.kernels.small_kernels import CALLS_MISSING_FUNCTION, small_step
from workbench.machine import processor as machine

needs_objdump = pytest.mark.skipif(shutil.which("objdump") is None, reason="objdump is missing: apt install binutils")
FLAGS = sorted(frozenset().union(*(level.cpuinfo_flags for level in Level)))


@given(st.sets(st.sampled_from(FLAGS)), st.sets(st.sampled_from(FLAGS)))
def test_more_features_are_never_a_lower_level(some: set[str], more: set[str]) -> None:
    def rank(flags: set[str]) -> int:
        level = level_of(frozenset(flags))
        return -1 if level is None else level.rank

    assert rank(some) <= rank(some | more)
    if level := level_of(frozenset(some)):
        assert level.cpuinfo_flags <= some


def test_each_level_has_all_of_the_one_before() -> None:
    for lower, higher in zip(tuple(Level), tuple(Level)[1:], strict=False):
        assert lower.cpuinfo_flags < higher.cpuinfo_flags and set(lower.llvm_features) < set(higher.llvm_features)


@pytest.mark.parametrize("level", [None, *Level], ids=str)
def test_records_tell_the_same_level_by_the_flags_they_keep(level: Level | None) -> None:
    flags = frozenset({"sse2", "avx"}) if level is None else level.cpuinfo_flags
    kept = [flag for flag in machine.REPORTED_FLAGS if flag in flags]
    assert machine.simd_level_of(kept) == level == level_of(flags)
    assert machine.simd_level() == current_level()


def test_a_machine_without_avx2_has_no_level_and_the_error_names_what_works(monkeypatch: pytest.MonkeyPatch) -> None:
    assert level_of(frozenset({"sse2", "avx"})) is None
    assert level_of(frozenset({"asimd", "bf16"})) is None  # as ARM lists its own
    monkeypatch.setattr("compiled_kernels.backends.current_level", lambda: None)
    from compiled_kernels.backends import _mlir_problem

    assert "AVX2" in str(_mlir_problem()) and "eager and inductor" in str(_mlir_problem())


def in_a_process(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    held = {"ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "WORKBENCH_LEVEL"}
    rest = {name: value for name, value in os.environ.items() if name not in held}
    root = Path(__file__).parents[2]
    command = (sys.executable, *command)
    return subprocess.run(command, cwd=root, env=rest | environment, capture_output=True, text=True, check=False)


@pytest.mark.skipif(current_level() is None, reason="this machine has no level of x86-64 with AVX2")
def test_a_process_is_held_to_a_level_with_torch() -> None:
    done = in_a_process(
        "-c",
        "import compiled_kernels, torch, os; from compiled_kernels.level import current_level, available_levels;"
        "capability = torch.backends.cpu.get_cpu_capability();"
        "print(current_level(), len(available_levels()), capability, os.environ['ONEDNN_MAX_CPU_ISA']);"
        "print(os.environ['TORCHINDUCTOR_CACHE_DIR'])",
        WORKBENCH_LEVEL="v3", TORCHINDUCTOR_CACHE_DIR="kept",
    )  # fmt: skip
    assert done.stdout.split() == ["v3", "1", "AVX2", "AVX2", "kept@v3"], done.stderr
    done = in_a_process("-c", "import compiled_kernels, os; print('ATEN_CPU_CAPABILITY' in os.environ)")
    assert done.stdout.strip() == "False", done.stderr


def test_unknown_level_is_refused_by_the_package_and_in_one_line_of_the_command_line() -> None:
    words = "WORKBENCH_LEVEL='avx512' is no level; known: v3, v4"
    done = in_a_process("-c", "import compiled_kernels", WORKBENCH_LEVEL="avx512")
    assert done.returncode != 0 and words in done.stderr
    done = in_a_process("-m", "workbench", "doctor", WORKBENCH_LEVEL="avx512")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and words in done.stderr, done.stderr


def test_more_than_the_machine_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from compiled_kernels import level

    monkeypatch.setattr(level, "machine_level", lambda: Level.V3)
    monkeypatch.setenv("WORKBENCH_LEVEL", "v4")
    with pytest.raises(ValueError, match="WORKBENCH_LEVEL=v4: this machine executes v3 at most"):
        level._asked.__wrapped__()


# What instructions of more than a level look like in a disassembly.
BEYOND_V3 = r"zmm|[xy]mm(1[6-9]|2[0-9]|3[01])|%k[0-7]"
VNNI, BF16 = r"vpdpbusd|vpdpwssd", r"bf16"
BEYOND = {
    Level.V3: f"{BEYOND_V3}|{VNNI}|{BF16}",
    Level.V4: f"{VNNI}|{BF16}",
    Level.V4_VNNI: BF16,
    Level.V4_BF16: r"%tmm|vaddph|vfmadd...ph",  # AMX and AVX512-FP16, which some machines have besides
}
SHOWN = {
    "add_rms_norm": "16x576 bfloat16",
    "linear_quantized": "2x64x40 int4 by 32 bfloat16",
    "linear": "2x64x40 bfloat16",
    "linear_quantized of INT8": "6x352x64 int8 INT8 activations panels bfloat16",
    "paged_attention": "decode 3 ragged bfloat16",
    "quantized_attention": "decode 3 ragged int8 bfloat16",
    "kv_write": "16x3x64 bfloat16",
    "expert_linear": "5 of 3 64x64 panels bfloat16",
}


def beyond(kernel_asm: str, level: Level) -> list[str]:
    """Instructions beyond `level`, outside of the functions that MLIR's engine adds and no kernel calls."""
    ours = (part for part in kernel_asm.split("\n\n") if "<_mlir_" not in part)
    lines = (line.strip() for part in ours for line in part.splitlines())
    return [line for line in lines if re.search(BEYOND[level], line.partition("\t")[2])]  # `bf16:` may be an address


@needs_mlir
@needs_objdump
@at_executed_levels
@pytest.mark.parametrize("operator", list(SHOWN))
def test_code_keeps_to_its_level(operator: str, level: Level) -> None:
    with limited_to(level):
        name = operator.partition(" ")[0]
        asm = stages(name, case_of(suite_of(name), SHOWN[operator])).stages["asm"]
    assert beyond(asm, level)[:3] == []


@needs_mlir
@needs_objdump
@pytest.mark.skipif(
    len(available_levels()) < 2, reason="this machine executes one level: nothing else could be in its code"
)
def test_code_of_a_higher_level_would_be_seen() -> None:
    with limited_to(available_levels()[-1]):
        asm = stages("linear", case_of(suite_of("linear"), SHOWN["linear"])).stages["asm"]
    assert beyond(asm, Level.V3)


@needs_mlir
@needs_objdump
@at_executed_levels
def test_a_whole_step_keeps_to_its_level(level: Level) -> None:
    assert beyond(small_step(level).kernel.stages["asm"], level)[:3] == []


@needs_mlir
def test_each_level_has_code_of_its_own() -> None:
    digests = {level: small_step(level).kernel.digest for level in available_levels()}
    assert len(set(digests.values())) == len(digests)


SIZE, LANES = 512, 64


def kernel_of(body: str, level: Level, result: str = "bf16") -> Kernel:
    """%x and %y, LANES of bfloat16 or float32 at a time of SIZE numbers, to %z, a vector of `result`."""
    f, b, r = memref((SIZE,), "f32"), memref((SIZE,), "bf16"), memref((SIZE,), result)
    text = f"""func.func @f(%a: {f}, %b: {b}, %c: {b}, %out: {r}) {{
%zero = arith.constant 0 : index
%lanes = arith.constant {LANES} : index
%size = arith.constant {SIZE} : index
scf.for %at = %zero to %size step %lanes {{
%wide = vector.load %a[%at] : {f}, vector<{LANES}xf32>
%x = vector.load %b[%at] : {b}, vector<{LANES}xbf16>
%y = vector.load %c[%at] : {b}, vector<{LANES}xbf16>
{body}
vector.store %z, %out[%at] : {r}, vector<{LANES}x{result}>
}}
return
}}"""
    return compile_text(text, "f", level=level)


def result_of(kernel: Kernel, wide: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.full((SIZE,), torch.nan, dtype=torch.bfloat16)
    kernel.function(4)(wide.data_ptr(), x.data_ptr(), y.data_ptr(), out.data_ptr())
    return out


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Every bit, but for NaN, which only has to stay NaN."""
    return torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(
        ours.nan_to_num(0.0, torch.inf, -torch.inf).view(torch.int16),
        theirs.nan_to_num(0.0, torch.inf, -torch.inf).view(torch.int16),
    )


NOTHING = torch.zeros(SIZE, dtype=torch.bfloat16)


def normal(values: torch.Tensor) -> torch.Tensor:
    """Subnormal numbers as zeros of their sign: AVX512-BF16's rounding takes and gives none."""
    return torch.where(values.abs() < 2.0**-126, torch.zeros(()).to(values.dtype).copysign(values), values)


@needs_mlir
@pytest.mark.parametrize("level", levels(smoke=True))
def test_rounding_is_torchs_for_every_upper_half(level: Level) -> None:
    """Every sign, exponent and leading fraction, with what is cut off below, at and above one half, ties to even."""
    kernel = kernel_of(f"%z = arith.truncf %wide : vector<{LANES}xf32> to vector<{LANES}xbf16>", level)
    upper = torch.arange(1 << 16, dtype=torch.int64)[:, None] << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int64)
    bits = (upper + lower).flatten()
    floats = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)
    theirs = floats.to(torch.bfloat16)
    if level is Level.V4_BF16:
        floats = normal(floats)
        theirs = floats.to(torch.bfloat16)
    ours = torch.cat([result_of(kernel, part.contiguous(), NOTHING, NOTHING) for part in floats.split(SIZE)])
    assert same_bits(ours, theirs)


@needs_mlir
@at_executed_levels
@pytest.mark.parametrize("operation", ["addf", "subf", "mulf", "divf", "maximumf"])
def test_arithmetic_on_bfloat16_is_torchs(operation: str, level: Level) -> None:
    """Each result is float32's, rounded: LLVM alone would call a library for it where the level has no instruction."""
    kernel = kernel_of(f"%z = arith.{operation} %x, %y : vector<{LANES}xbf16>", level)
    theirs = {"addf": torch.add, "subf": torch.sub, "mulf": torch.mul, "divf": torch.div, "maximumf": torch.maximum}
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        x, y = (torch.randn(SIZE, generator=generator).bfloat16() for _ in range(2))
        assert same_bits(result_of(kernel, torch.zeros(SIZE), x, y), theirs[operation](x, y))


@needs_mlir
@at_executed_levels
def test_a_symbol_that_is_missing_is_named(level: Level, capfd: pytest.CaptureFixture[str]) -> None:
    words = f"f for level {re.escape(level)} calls missing_function, which nothing here provides"
    kernel_refuses(words, compile_text, CALLS_MISSING_FUNCTION, "f", level=level)
    assert capfd.readouterr().err == ""
