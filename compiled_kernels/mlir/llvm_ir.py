"""A module of the LLVM dialect as the text of LLVM IR, for an LLVM other than torch-mlir's own."""

# The stubs of these optional packages, where installed, do not list what they export.
# pyright: reportAttributeAccessIssue=false, reportMissingImports=false
from __future__ import annotations

import re

import ml_dtypes
import numpy

KINDS = {"float": numpy.float32, "double": numpy.float64, "half": numpy.float16, "bfloat": ml_dtypes.bfloat16}
LETTER = {"half": "H", "bfloat": "R"}
_CONSTANT = re.compile(
    rf"\b(?P<kind>{'|'.join(KINDS)})\b"
    r"|(?<=[ (])(?:f0x(?P<bits>[0-9A-F]+)|(?P<number>[+-]inf|-?\d+\.\d+(?:e[+-]\d+)?))(?=[,)>\s]|$)"
)


def llvm_ir(llvm: str) -> str:
    """The text of LLVM IR that a module of the LLVM dialect (its text) stands for."""
    from torch_mlir.dialects.llvm import translate_module_to_llvmir
    from torch_mlir.ir import Context, Location, Module

    with Context(), Location.unknown():
        text = translate_module_to_llvmir(Module.parse(llvm).operation)
    return "\n".join(map(constants_by_bits, text.split("\n")))


def constants_by_bits(line: str) -> str:
    """A line of LLVM IR with its floating-point constants by their bits, as every LLVM reads them. From 23 on LLVM
    writes them `-inf`, `f0x3727C5AC` or in the fewest digits, which those before refuse.

    >>> constants_by_bits("  %4 = fmul float %3, f0x3FB8AA3B")
    '  %4 = fmul float %3, 0x3FF7154760000000'
    """
    kind = ""  # of the type named last before a constant

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
