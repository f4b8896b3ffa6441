"""MLIR text to machine code, once for each content: in this process, then on disk."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from compiled_kernels.lanes import LaneError
from compiled_kernels.mlir.artifacts import Artifacts, cache_directory, key_of
from compiled_kernels.mlir.execute import Code, Engine, Kernel, SharedObject, _open_globally
from compiled_kernels.mlir.pipeline import passes_to_llvm

OPT_LEVEL = 3


def compile_text(
    text: str,
    entry: str,
    *,
    lowered_from: str = "vector",
    libraries: tuple[str, ...] = (),
    directory: Path | None = None,
    before: Mapping[str, str] | None = None,
) -> Kernel:
    """The function `entry` of an MLIR module, as machine code for this CPU.

    `lowered_from` is the module's level, `vector` or `bufferized` (see pipeline.py). Memrefs are static and passed as
    bare pointers. External functions are declared private and found in `libraries` (paths). `before` holds stages the
    text came through, kept with it. `directory` is where artifacts lie, by default the user's cache.
    Raises LaneError with MLIR's message where the text does not compile.
    """
    return _compiled(text, entry, lowered_from, libraries, directory or cache_directory(), tuple((before or {}).items()))


@cache
def _compiled(
    text: str, entry: str, level: str, libraries: tuple[str, ...], directory: Path, before: tuple[tuple[str, str], ...]
) -> Kernel:
    key = key_of(text=text, passes=passes_to_llvm(level), opt_level=OPT_LEVEL, linker=linker() is not None)
    artifacts = Artifacts(directory)
    if (paths := artifacts.load(key)) is None:
        stages, engine, library = _build(text, level, libraries)
        stages = {**dict(before), **stages}
        files = {"stages": (json.dumps(stages).encode(), ".json")}
        if library is not None:
            files["library"] = (library, ".so")
        try:
            paths = artifacts.store(key, files)
        except OSError as error:
            warnings.warn(f"mlir: compiled code is not kept on disk ({error})", stacklevel=2)
            return Kernel(entry, key, Engine(engine), None, stages)
        if library is None:
            return Kernel(entry, key, Engine(engine), None, stages)
    return Kernel(entry, key, _loaded(paths, libraries), paths.get("library"), paths["stages"])


def _loaded(paths: Mapping[str, Path], libraries: tuple[str, ...]) -> Code:
    if "library" in paths:
        return SharedObject(paths["library"], libraries)
    return Engine(engine_of(json.loads(paths["stages"].read_text())["llvm"], libraries))


def _build(text: str, level: str, libraries: tuple[str, ...]) -> tuple[dict[str, str], Any, bytes | None]:
    llvm = run_passes(text, passes_to_llvm(level))
    engine = engine_of(llvm, libraries)
    return {level: text, "llvm": llvm}, engine, _linked(engine)


def run_passes(text: str, passes: str) -> str:
    """The module after `passes`; raises LaneError with MLIR's message."""
    from torch_mlir.ir import Context, Location, MLIRError, Module
    from torch_mlir.passmanager import PassManager

    with Context(), Location.unknown():
        try:
            module = Module.parse(text)
            PassManager.parse(f"builtin.module({passes})").run(module.operation)
        except MLIRError as error:
            raise LaneError(f"mlir: {' '.join(str(error).split())[:600]}") from None
        return str(module)


def engine_of(llvm: str, libraries: tuple[str, ...]) -> Any:
    """MLIR's execution engine over a module of the LLVM dialect."""
    from torch_mlir.execution_engine import ExecutionEngine
    from torch_mlir.ir import Context, Location, Module

    _open_globally(libraries)
    with Context(), Location.unknown():
        module = Module.parse(llvm)
        return ExecutionEngine(module, opt_level=OPT_LEVEL, shared_libs=list(libraries), enable_pic=True)


@cache
def linker() -> tuple[str, ...] | None:
    """The command that makes a shared object, without its files; None where this machine has none."""
    for name in ("cc", "gcc", "clang"):
        if path := shutil.which(name):
            return (path, "-shared", "-Wl,-Bsymbolic", "-Wl,--no-as-needed")
    for name in ("ld", "ld.lld"):
        if path := shutil.which(name):
            return (path, "-shared", "-Bsymbolic")
    return None


def _linked(engine: Any) -> bytes | None:
    command = linker()
    if command is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        compiled, shared = f"{folder}/kernel.o", f"{folder}/kernel.so"
        engine.dump_to_object_file(compiled)
        mathematics = ["-lm"] if "-Wl,-Bsymbolic" in command else []
        arguments = [*command, compiled, "-o", shared, *mathematics]
        run = subprocess.run(arguments, capture_output=True, text=True, check=False)
        if run.returncode:
            raise LaneError(f"mlir: the linker failed: {' '.join(run.stderr.split())[:300]}")
        return Path(shared).read_bytes()
