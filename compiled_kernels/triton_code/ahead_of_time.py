"""Compile kernels ahead of time, without a GPU: every stage as text, and the assembler's resource counts.

The compiled kernels are those that the examples (`examples.py`) would launch.
"""

from __future__ import annotations

import functools
import inspect
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compiled_kernels.backends import BackendError, triton_interpreted
from compiled_kernels.triton_code.launch import KernelLaunch

STAGES = ("source", "ttir", "ttgir", "llir", "ptx")
COMMENT = {"source": "#", "ttir": "//", "ttgir": "//", "llir": ";", "ptx": "//"}
DIVISIBLE_BY_16 = [["tt.divisibility", 16]]  # tells Triton that 16 divides a pointer or number
FIGURES = {
    "registers": r"Used (\d+) registers",
    "stores": r"(\d+) bytes spill stores",
    "loads": r"(\d+) bytes spill loads",
}


@dataclass(frozen=True)
class TritonArtifact:
    """One kernel compiled for one generation of GPU. `registers` (per thread) and `spill_bytes` (stored and loaded) are
    reported by the assembler, `shared_bytes` is what Triton requests at each launch, `cubin` is the machine code."""

    name: str  # `decode: attend`
    sm: int
    constexprs: Mapping[str, Any]
    stages: Mapping[str, str]
    num_warps: int
    registers: int
    shared_bytes: int
    spill_bytes: int
    cubin: bytes


@functools.cache
def artifacts(operator: str, sm: int = 90) -> tuple[TritonArtifact, ...]:
    """Return the compiled kernels of `operator`'s examples for compute capability `sm`; they are compiled once per
    process.

    Raises BackendError if the backend does not have the operator, or if Triton is missing or interpreted.
    """
    from compiled_kernels.triton_code.examples import EXAMPLES

    if operator not in EXAMPLES:
        raise BackendError(f"{operator} has no kernels in backend triton; known: {', '.join(EXAMPLES)}")
    try:
        import triton  # noqa: F401 (is it installed?)
    except ImportError:
        raise BackendError("triton is not installed: pip install 'inference-workbench[triton]'") from None
    if triton_interpreted():
        raise BackendError("nothing is compiled under TRITON_INTERPRET=1: unset it")
    return tuple(
        _compiled(f"{example}: {launch.kernel.__name__}", launch, sm)
        for example, launches in EXAMPLES[operator]().items()
        for launch in launches
    )


def stages(operator: str, sm: int = 90) -> dict[str, str]:
    """Return the text of each stage (source, ttir, ttgir, llir, ptx), one kernel after another."""
    found = artifacts(operator, sm)

    def text(stage: str) -> str:
        return "\n".join(f"{COMMENT[stage]} {_title(one)}\n{one.stages[stage]}" for one in found)

    return _Stages(operator, {stage: text(stage) for stage in STAGES})


class _Stages(dict[str, str]):
    """Stages by name; a wrong name raises an error that lists the right ones."""

    def __init__(self, operator: str, text: Mapping[str, str]):
        super().__init__(text)
        self.operator = operator

    def __missing__(self, stage: str) -> str:
        raise BackendError(f"{self.operator}: backend triton has no stage {stage!r}; known: {', '.join(self)}")


def _title(artifact: TritonArtifact) -> str:
    constants = ", ".join(f"{name}={value}" for name, value in artifact.constexprs.items())
    return (
        f"{artifact.name} sm_{artifact.sm} ({constants}): {artifact.num_warps} warps, {artifact.registers} registers, "
        f"{artifact.shared_bytes} bytes shared, {artifact.spill_bytes} bytes spilled, cubin {len(artifact.cubin)} bytes"
    )


def _compiled(name: str, launch: KernelLaunch, sm: int) -> TritonArtifact:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, attributes = _specialized(launch)
    source = ASTSource(launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    made = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
    texts = {stage: made.asm[stage] for stage in STAGES if stage != "source"}
    figures = _assembled(texts["ptx"])
    return TritonArtifact(
        name=name,
        sm=sm,
        constexprs={key: value for key, value in constants.items() if key.isupper()},
        stages={"source": inspect.getsource(launch.kernel.fn), **texts},
        num_warps=launch.num_warps,
        registers=figures["registers"],
        shared_bytes=made.metadata.shared,
        spill_bytes=figures["stores"] + figures["loads"],
        cubin=made.asm["cubin"],
    )


def _specialized(launch: KernelLaunch) -> tuple[dict, dict, dict]:
    """Return signature, constants and attributes as Triton's launcher would choose them for these arguments."""
    from triton._utils import canonicalize_dtype

    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr or (type(value) is int and value == 1 and not parameter.do_not_specialize):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        if isinstance(value, int):
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            aligned = value % 16 == 0 and not parameter.do_not_specialize
        elif isinstance(value, float):
            signature[parameter.name], aligned = "fp32", False
        else:
            signature[parameter.name], aligned = f"*{canonicalize_dtype(value.dtype)}", True
        if aligned:
            attributes[(place,)] = DIVISIBLE_BY_16
    return signature, constants, attributes


def _assembled(ptx: str) -> dict[str, int]:
    """Return registers a thread and bytes spilled, as Triton's own assembler reports them of `ptx`."""
    from triton import knobs

    (architecture,) = re.findall(r"^\.target (\w+)", ptx, re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.ptx")
        file.write_text(ptx)
        command = [knobs.nvidia.ptxas.path, "-v", f"--gpu-name={architecture}", str(file), "-o", f"{file}.cubin"]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    return {figure: sum(map(int, re.findall(pattern, report))) for figure, pattern in FIGURES.items()}
