"""Whole steps through IREE: one ahead-of-time artifact, weights beside it, caches written in place."""

# The stubs of these optional packages, where installed, do not list what they export.
# pyright: reportAttributeAccessIssue=false, reportMissingImports=false
from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from compiled_kernels.backends import BackendError
from compiled_kernels.mlir.artifacts import ArtifactCache, cache_directory, cpu_description, key_of, version_of
from compiled_kernels.mlir.iree_export import SCOPE, export

# Data tiling packs the weights once, when they are loaded; float64 is kept, for angles of long contexts.
FLAGS = ("--iree-opt-level=O3", "--iree-global-opt-data-tiling", "--iree-input-demote-f64-to-f32=false")
CPU = (
    "--iree-hal-target-device=local",
    "--iree-hal-local-target-device-backends=llvm-cpu",
    "--iree-llvmcpu-target-cpu=host",
)
PHASES = {"1.input": "linalg", "6.flow": "flow", "7.stream": "stream"}


@dataclass(frozen=True)
class IreeStep:
    """A compiled module: call it with tensors of the shapes it was compiled for.

    Tensors are read and written where they lie; inputs that the module mutates must be contiguous. `digest` names the
    artifact, whose `stages` are torch (dialect), linalg, flow and stream.
    """

    name: str
    digest: str
    shapes: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    written: frozenset[int]
    results: int
    files: Mapping[str, Path]
    program: Any = field(repr=False)
    kept: dict[int, tuple[int, Any]] = field(default_factory=dict, repr=False)

    def __call__(self, *inputs: Tensor) -> Any:
        """Return the module's result, or a tuple of results. Raises ValueError for other shapes or types."""
        if len(inputs) != len(self.shapes):
            raise ValueError(f"{self.name} takes {len(self.shapes)} tensors; {len(inputs)} given")
        views = [self._view(place, tensor) for place, tensor in enumerate(inputs)]
        results = self.program(views, self.results)
        return results[0] if len(results) == 1 else tuple(results)

    def _view(self, place: int, tensor: Tensor) -> Any:
        shape, dtype = self.shapes[place]
        if tensor.shape != shape or tensor.dtype != dtype:
            given = f"{list(tensor.shape)} {tensor.dtype}"
            raise ValueError(f"{self.name}: input {place} is {given}; compiled for {list(shape)} {dtype}")
        if place not in self.written:
            return self.program.view(tensor.contiguous())
        if not tensor.is_contiguous():
            raise ValueError(f"{self.name}: input {place} is written in place and must be contiguous")
        address, view = self.kept.get(place, (0, None))
        if address != tensor.data_ptr():  # a cache comes again and again, and its view keeps it alive
            view = self.program.view(tensor)
            self.kept[place] = tensor.data_ptr(), view
        return view

    @property
    def stages(self) -> dict[str, str]:
        return {name: path.read_text() for name, path in self.files.items() if path.suffix == ".mlir"}


def compile_step(
    module: nn.Module, example_inputs: Sequence[Tensor], name: str, *, threads: int = 1, directory: Path | None = None
) -> IreeStep:
    """Compile `module` for the shapes of `example_inputs`, ahead of time, for this CPU.

    Its weights stay where they are, and IREE packs its own copy of the matrices when it loads them. Artifacts are kept
    by content; the weights are no part of it. Raises BackendError with the compiler's message.
    """
    exported = export(module, example_inputs, name)
    digest, files = _built(exported.text, (*CPU, *FLAGS), name, directory)
    from compiled_kernels.mlir.iree_run import Program

    program = Program(files["code"], exported.parameters, SCOPE, threads)
    shapes = tuple((tuple(each.shape), each.dtype) for each in example_inputs)
    return IreeStep(name, digest, shapes, exported.written, exported.results, files, program)


def _built(text: str, flags: tuple[str, ...], name: str, directory: Path | None) -> tuple[str, Mapping[str, Path]]:
    versions = {each: version_of(each) for each in ("iree-base-compiler", "iree-turbine")}
    key = key_of(text=text, flags=flags, versions=versions, cpu=cpu_description())
    artifacts = ArtifactCache(directory or cache_directory())
    if files := artifacts.load(key):
        return key, files
    with tempfile.TemporaryDirectory() as folder:
        code = iree_compile(text, (*flags, f"--dump-compilation-phases-to={folder}"), name)
        content = {"code": (code, ".vmfb"), "torch": (text.encode(), ".mlir")}
        for path in sorted(Path(folder).iterdir()):
            stage = next((stage for phase, stage in PHASES.items() if phase in path.name), None)
            if stage:
                content[stage] = (path.read_bytes(), ".mlir")
    return key, artifacts.store_or_temporary(key, content)


def iree_compile(text: str, flags: Sequence[str], name: str, input_type: str = "torch") -> bytes:
    """Compile `text` with iree-compile. Raises BackendError with its first messages."""
    from iree.compiler import CompilerToolError, compile_str

    try:
        return cast(bytes, compile_str(text, input_type=input_type, extra_args=list(flags)))
    except CompilerToolError as error:
        found = [line for line in str(error).splitlines() if "error:" in line][:3]
        raise BackendError(f"{name}: iree-compile: {' / '.join(found)[:600]}") from None


@cache
def cuda_text(text: str, name: str, architecture: str = "sm_80", directory: Path | None = None) -> str:
    """Return the PTX of every kernel of a module of the torch dialect (`IreeStep.stages["torch"]`), ahead of time.

    IREE knows no sm_90 (`missing GPU target in #hal.executable.target`): for it, code lowered for sm_80 is retargeted
    before its instructions are chosen, so it uses none of what sm_90 added.
    """
    retargeted = architecture not in ("sm_80", "sm_86", "sm_89")
    known = "sm_80" if retargeted else architecture
    target = ("--iree-hal-target-backends=cuda", f"--iree-cuda-target={known}", *FLAGS[:1], *FLAGS[2:])
    key = key_of(text=text, cuda=architecture, flags=target, versions=version_of("iree-base-compiler"))
    artifacts = ArtifactCache(directory or cache_directory())
    if files := artifacts.load(key):
        return files["ptx"].read_text()
    with tempfile.TemporaryDirectory() as folder:
        dump = f"--iree-hal-dump-executable-binaries-to={folder}"
        if retargeted:
            sources = iree_compile(text, (*target, "--compile-to=executable-sources"), name).decode()
            sources = sources.replace(known, architecture).replace("+ptx76", "+ptx80")
            resumed = (*target, "--compile-from=executable-sources", dump)
            iree_compile(sources, resumed, name, input_type="none")
        else:
            iree_compile(text, (*target, dump), name)
        ptx = "\n".join(path.read_text() for path in sorted(Path(folder).glob("*.ptx")))
    if not ptx:
        raise BackendError(f"{name}: IREE dumped no PTX for {architecture}")
    artifacts.store_or_temporary(key, {"ptx": (ptx.encode(), ".ptx")})
    return ptx
