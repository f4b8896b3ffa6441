"""Compile kernels ahead of time for AArch64, without such a machine: a test of how portable their MLIR text is.

A level's text is compiled unchanged. The text of `v3` suits NEON: its 16 vectors of 256 bits are the 32 vectors of 128
bits of AArch64. torch-mlir includes only LLVM's x86 backend, so it compiles to LLVM IR, which is written as text;
llvmlite, whose LLVM has every backend, compiles that text.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy

from compiled_kernels.backends import Backend, BackendError, backend_problems
from compiled_kernels.cases import Case, Suite, suite_of, suites
from compiled_kernels.level import Level, available_levels, limited_to
from compiled_kernels.mlir.compile import OPT_LEVEL, run_passes
from compiled_kernels.mlir.pipeline import Processor, passes_to_llvm

KINDS = {"float": numpy.float32, "double": numpy.float64, "half": numpy.float16, "bfloat": ml_dtypes.bfloat16}
LETTER = {"half": "H", "bfloat": "R"}
_CONSTANT = re.compile(
    rf"\b(?P<kind>{'|'.join(KINDS)})\b"
    r"|(?<=[ (])(?:f0x(?P<bits>[0-9A-F]+)|(?P<number>[+-]inf|-?\d+\.\d+(?:e[+-]\d+)?))(?=[,)>\s]|$)"
)
TARGETS = {"aarch64": ("aarch64-linux-gnu", Processor("generic", ("+neon",), "neoverse-n1"))}
NO_LLVM = "llvmlite, whose LLVM has the AArch64 backend, is not installed: pip install llvmlite"
INTRINSIC = r"llvm\.x86\.[\w.]+"
# Functions that C's library and OpenMP provide on any machine. A call of any other function is code that LLVM could not
# generate itself.
OPENMP = ("omp_get_thread_num", "omp_get_num_threads", "GOMP_barrier")
LIBC = ("malloc", "free", "memcpy", "memset", "memmove", "expf", "logf", "sinf", "cosf", "tanhf", "erff")
PROVIDED = frozenset((*OPENMP, *LIBC))


def llvm_ir(llvm: Any) -> str:
    """Return the LLVM IR text of a module in the LLVM dialect."""
    from torch_mlir.dialects.llvm import translate_module_to_llvmir  # type: ignore[attr-defined] (not in its stubs)
    from torch_mlir.ir import Location  # type: ignore[attr-defined] (not in its stubs)

    with llvm.context, Location.unknown():
        text = translate_module_to_llvmir(llvm.operation)
    return "\n".join(map(constants_by_bits, text.split("\n")))


def constants_by_bits(line: str) -> str:
    """Return a line of LLVM IR with floating-point constants written as bits, which every version of LLVM reads. From
    version 23 on LLVM writes `-inf`, `f0x3727C5AC` or the fewest digits, which earlier versions refuse.

    >>> constants_by_bits("  %4 = fmul float %3, f0x3FB8AA3B")
    '  %4 = fmul float %3, 0x3FF7154760000000'
    """
    kind = ""  # type named last before a constant

    def written(found: re.Match[str]) -> str:
        nonlocal kind
        if found["kind"]:
            kind = found["kind"]
        return found[0] if found["kind"] or not kind else _by_bits(kind, found["bits"], found["number"])

    return _CONSTANT.sub(written, line)


def _by_bits(kind: str, bits: str | None, number: str | None) -> str:
    element = KINDS[kind]
    size = numpy.dtype(element).itemsize
    if bits is not None:
        value = numpy.frombuffer(int(bits, 16).to_bytes(size, "little"), element)
    else:
        value = numpy.array([float(number or 0)], element)
    if kind == "float":  # by the bits of the double that is equal to it
        return f"0x{int(value.astype(numpy.float64).view(numpy.uint64)[0]):016X}"
    return f"0x{LETTER.get(kind, '')}{int(value.view(f'u{size}')[0]):0{2 * size}X}"


@dataclass(frozen=True)
class CrossCompiledObject:
    """A module compiled for one target: `code` is a relocatable ELF object, `calls` the symbols it needs."""

    triple: str
    llvm_ir: str = field(repr=False)
    assembly: str = field(repr=False)
    code: bytes = field(repr=False)

    @property
    def calls(self) -> tuple[str, ...]:
        called = re.findall(r"^\s+bl?\s+([A-Za-z_]\w*)", self.assembly, re.MULTILINE)
        defined = set(re.findall(r"^([A-Za-z_]\w*):", self.assembly, re.MULTILINE))
        return tuple(sorted(set(called) - defined))


@dataclass(frozen=True)
class PortableKernel:
    """The result of compiling one case of an operator, from its text for `level`. `status` is `portable`, `x86` (the
    text names x86 instructions) or `failed`. `multiply_adds` is the number of NEON multiply-adds of four numbers."""

    operator: str
    case: str
    level: str
    status: str
    reason: str = ""
    bytes: int = 0
    multiply_adds: int = 0
    calls: tuple[str, ...] = ()


def unavailable_reason() -> str | None:
    """Return the reason why nothing can be compiled for another processor here; None if it can."""
    if wrong := backend_problems()[Backend.MLIR]:
        return wrong
    try:
        import llvmlite.binding  # noqa: F401 (is it installed?)
    except ImportError:
        return NO_LLVM
    return None


def portable_kernels(operator: str | None = None, target: str = "aarch64") -> Iterator[PortableKernel]:
    """Compile kernels of the backend mlir for another processor; yield a result for each operator, each element type,
    and each level that this machine can write text for. Raises BackendError for an unknown operator, or if nothing can
    be compiled here."""
    if wrong := unavailable_reason():
        raise BackendError(f"ahead of time: {wrong}")
    for suite in suites() if operator is None else (suite_of(operator),):
        for case in _one_of_each_type(suite):
            for level in available_levels():
                with limited_to(level):
                    row = _row(suite, case, level, target)
                if row is not None:
                    yield row


def compile_ahead(text: str, lowered_from: str = "vector", target: str = "aarch64") -> CrossCompiledObject:
    """Compile a module to machine code for `target`, by the passes of level v3, which round bfloat16 by integer
    operations. Raises BackendError if the text names x86 instructions, or if LLVM does not compile it."""
    if wrong := unavailable_reason():
        raise BackendError(f"ahead of time: {wrong}")
    if named := x86_intrinsics(text):
        raise BackendError(f"ahead of time: the text names {', '.join(named)}, which only x86 has")
    triple, processor = TARGETS[target]
    llvm = run_passes(text, passes_to_llvm(lowered_from, Level.V3), processor)
    return _emitted(llvm_ir(llvm), triple, processor)


def x86_intrinsics(text: str) -> tuple[str, ...]:
    """Return the x86 intrinsics that an MLIR text names."""
    return tuple(sorted(set(re.findall(INTRINSIC, text))))


def _one_of_each_type(suite: Suite) -> list[Case]:
    """Return the first case of each element type, timed cases before others."""
    ordered = sorted(suite.cases, key=lambda case: not case.timed)
    return list({case.arguments["dtype"]: case for case in reversed(ordered)}.values())[::-1]


def _row(suite: Suite, case: Case, level: Level, target: str) -> PortableKernel | None:
    from compiled_kernels.mlir.show import stages

    labels = suite.operator, case.name, str(level)
    try:
        made = stages(suite.operator, case).stages
    except BackendError as error:
        if "has no stages on backend mlir" in str(error):
            return None
        return PortableKernel(*labels, "failed", str(error))
    lowered_from = "bufferized" if "bufferized" in made else "vector"
    if named := x86_intrinsics(made[lowered_from]):
        return PortableKernel(*labels, "x86", f"names {', '.join(named)}")
    try:
        artifact = compile_ahead(made[lowered_from], lowered_from, target)
    except BackendError as error:
        return PortableKernel(*labels, "failed", str(error))
    missing = [name for name in artifact.calls if name not in PROVIDED]
    reason = f"calls {', '.join(missing)}, which no library here provides" if missing else ""
    added = len(re.findall(r"\bfmla\s+v\d+\.4s", artifact.assembly))
    return PortableKernel(
        *labels, "failed" if missing else "portable", reason, len(artifact.code), added, artifact.calls
    )


@functools.cache
def _backends() -> Any:
    from llvmlite import binding

    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    return binding


def _emitted(text: str, triple: str, processor: Processor) -> CrossCompiledObject:
    binding = _backends()
    try:
        module = binding.parse_assembly(text)
        module.triple = triple
        machine = binding.Target.from_triple(triple).create_target_machine(
            cpu=processor.cpu, features=",".join(processor.features), opt=OPT_LEVEL, reloc="pic"
        )
        module.data_layout = str(machine.target_data)
        module.verify()
        builder = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=OPT_LEVEL))
        builder.getModulePassManager().run(module, builder)
        return CrossCompiledObject(triple, str(module), machine.emit_assembly(module), machine.emit_object(module))
    except RuntimeError as error:
        message = " ".join(str(error).split())[:300]
        raise BackendError(f"ahead of time: LLVM does not compile this for {triple}: {message}") from None
