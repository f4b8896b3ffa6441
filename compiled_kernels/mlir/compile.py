"""Compile MLIR text to machine code, once for equal content: cached in this process, then on disk."""

# The type stubs of these optional packages do not list their exports.
# pyright: reportAttributeAccessIssue=false, reportMissingImports=false
from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from compiled_kernels.backends import UNSUPPORTED_CPU, BackendError
from compiled_kernels.builder.functions import text_of
from compiled_kernels.level import Level, current_level, executed_as
from compiled_kernels.mlir.artifacts import ArtifactCache, cache_directory, key_of
from compiled_kernels.mlir.emulate import emulate_instructions
from compiled_kernels.mlir.execute import JITCode, Kernel, SharedObject, capture_native_errors, open_globally
from compiled_kernels.mlir.invoke import libgomp_path
from compiled_kernels.mlir.lower import lower, sources
from compiled_kernels.mlir.pipeline import ONCE, Processor, passes_to_llvm, processor_of, run_pipeline, target_level
from compiled_kernels.mlir.rewrites import expand_exp
from compiled_kernels.result_cache import own_code

OPT_LEVEL = 3


def compile_text(
    text: str,
    entry: str,
    *,
    lowered_from: str = "vector",
    level: Level | None = None,
    libraries: tuple[str, ...] = (),
    directory: Path | None = None,
    before: Mapping[str, str] | None = None,
) -> Kernel:
    """Compile the function `entry` of an MLIR module to machine code for a level of the instruction set.

    Memrefs are static and passed as bare pointers.

    Args:
        text: the module.
        entry: the name of the function.
        lowered_from: `vector` or `bufferized`, the MLIR level of the module (see pipeline.py).
        level: level of the instruction set; this process's unless given.
        libraries: paths of libraries with external functions, which are declared private.
        directory: folder of artifacts; the user's cache unless given.
        before: earlier stages of the text, stored with it.

    Raises:
        BackendError: with MLIR's message if the text does not compile, or if its code calls a function that nothing
            provides.
    """
    earlier = tuple((before or {}).items())
    level = level or _level()
    kept = directory or cache_directory()
    return _compiled(text, entry, lowered_from, level, executed_as(level), libraries, kept, earlier)


def _level() -> Level:
    level = current_level()
    if level is None:
        raise BackendError(f"backend mlir: {UNSUPPORTED_CPU}")
    return level


def compile_function(
    function: Callable[..., Any],
    examples: Iterable[Tensor],
    name: str,
    *,
    recipe: Mapping[str, object],
    lanes: int = 0,
    directory: Path | None = None,
) -> Kernel:
    """Compile a torch function for the shapes of `examples`. The kernel takes bare pointers to the inputs, then to the
    results.

    Args:
        function: the function; it returns a tensor or a tuple of tensors and mutates nothing.
        examples: tensors of the shapes and types to compile for.
        name: the function's name in the module.
        recipe: everything that decides what `function` computes; if the same recipe was compiled before, on this
            machine and from these sources, torch-mlir is not even imported.
        lanes: length of vectors, as in `lower`.
        directory: folder of artifacts; the user's cache unless given.
    """
    examples = tuple(examples)
    shapes = [(list(each.shape), str(each.dtype)) for each in examples]
    directory, level = directory or cache_directory(), _level()
    made = key_of(recipe=dict(recipe), name=name, shapes=shapes, lanes=lanes, sources=sources(), **_content(level))

    def build() -> Kernel:
        stages = lower(function, examples, name, lanes)
        text = stages.pop("bufferized")
        return compile_text(text, name, lowered_from="bufferized", level=level, directory=directory, before=stages)

    return _by_recipe(made, name, build, directory)


def compile_entry(name: str, level: Level, emit: Callable[[], object]) -> Kernel:
    """Compile the function `name` of the module that `emit` builds, as `compile_text` does; it may call OpenMP
    functions.
    """
    return compile_text(text_of(emit), name, level=level, libraries=(libgomp_path(),))


@cache
def compile_shape(
    write: Callable[..., str], *shape: Hashable, entry: str, level: Level | None = None, directory: Path | None = None
) -> Kernel:
    """Compile the function `entry` of the module that `write(*shape)` returns, as `compile_text` does; it may call
    OpenMP functions.

    The module depends only on the shape and the sources of this package: if it was compiled before, on this machine and
    from these sources, it is not even written, and torch-mlir is not imported.
    """
    level, libraries, directory = level or _level(), (libgomp_path(),), directory or cache_directory()
    recipe = f"{write.__module__}.{write.__qualname__}"
    made = key_of(recipe=recipe, shape=all_fields(shape), name=entry, sources=own_code(), **_content(level))

    def build() -> Kernel:
        return compile_text(write(*shape), entry, level=level, libraries=libraries, directory=directory)

    return _by_recipe(made, entry, build, directory, libraries)


def all_fields(value: object) -> Any:
    """Return a shape as JSON-ready data with every field, also fields that its repr omits, so that different shapes
    never have equal data. Raises TypeError for values other than numbers, text, tuples and dataclasses, because another
    value could have the same repr."""
    if is_dataclass(value):
        held = {each.name: all_fields(getattr(value, each.name)) for each in fields(value)}
        return {"": type(value).__qualname__, **held}
    if isinstance(value, tuple):
        return [all_fields(each) for each in value]
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(f"a shape cannot be a cache key with {value!r}: another may look the same")


def _by_recipe(
    recipe: str, entry: str, build: Callable[[], Kernel], directory: Path, libraries: tuple[str, ...] = ()
) -> Kernel:
    """Return the kernel that a recipe was compiled to before; if there is none, build it and store the recipe."""
    artifacts = ArtifactCache(directory)
    if (key := artifacts.key_of_recipe(recipe)) and (paths := artifacts.load(key)):
        return _kernel(entry, key, paths, libraries)
    kernel = build()
    try:
        artifacts.link_recipe(recipe, kernel.digest)
    except OSError as error:
        _not_kept(error)
    return kernel


@cache
def _compiled(
    text: str,
    entry: str,
    lowered_from: str,
    level: Level,
    executed: Level,
    libraries: tuple[str, ...],
    directory: Path,
    before: tuple[tuple[str, str], ...],
) -> Kernel:
    key = key_of(text=text, before=before, **_content(level, lowered_from))
    artifacts = ArtifactCache(directory)
    if paths := artifacts.load(key):
        return _kernel(entry, key, paths, libraries)
    passes = passes_to_llvm(lowered_from, executed)
    llvm = run_passes(text, passes, processor_of(executed), emulated=executed != level)
    engine = engine_of(llvm, libraries)
    stages = {**dict(before), lowered_from: text, "llvm": str(llvm)}
    files = {"stages": (json.dumps(stages).encode(), ".json")}
    if (library := _linked(engine, entry, level)) is not None:
        files["library"] = (library, ".so")
    try:
        paths = artifacts.store(key, files)
    except OSError as error:
        _not_kept(error)
        paths = {}
    if "library" in paths:
        return _kernel(entry, key, paths, libraries)
    return Kernel(entry, key, JITCode(engine), None, paths.get("stages", stages))


def _content(level: Level, lowered_from: str = "bufferized") -> dict[str, Any]:
    """Return everything in addition to the text that decides a module's code."""
    functions = target_level, expand_exp, emulate_instructions
    code, level = [Path(function.__code__.co_filename).read_text() for function in functions], executed_as(level)
    return {
        "level": level,
        "cpu": level.llvm_cpu,
        "features": level.llvm_features,
        "passes": passes_to_llvm(lowered_from, level),
        "linked": linker() is not None,
        "opt_level": OPT_LEVEL,
        "code": code,
    }


def _not_kept(error: OSError) -> None:
    warnings.warn(f"mlir: compiled code is not kept on disk ({error})", stacklevel=3)


def _kernel(entry: str, key: str, paths: Mapping[str, Path], libraries: tuple[str, ...]) -> Kernel:
    if (library := paths.get("library")) is not None:
        code = SharedObject(library, libraries)
    else:
        code = JITCode(engine_of(parsed(json.loads(paths["stages"].read_text())["llvm"]), libraries))
    return Kernel(entry, key, code, library, paths["stages"])


def parsed(text: str) -> Any:
    """Parse the text of a module in a separate MLIR context and return the module. Raises BackendError with MLIR's
    message.
    """
    from torch_mlir.ir import Context, Location, MLIRError, Module

    with Context(), Location.unknown():
        try:
            return Module.parse(text)
        except MLIRError as error:
            raise BackendError(f"mlir: {' '.join(str(error).split())[:600]}") from None


def run_passes(text: str, pipeline: str, processor: Processor, emulated: bool = False) -> Any:
    """Parse `text`, run `pipeline` on it, and return the module in the LLVM dialect, for `processor`; with `emulated`,
    instructions that the machine lacks are replaced. Raises BackendError with MLIR's message."""
    from torch_mlir.ir import Location

    module = parsed(text)
    with module.context, Location.unknown():
        run_pipeline(module, ONCE)
        expand_exp(module)
        if emulated:
            emulate_instructions(module)
        run_pipeline(module, pipeline, verify=False)  # all thirty passes would verify; LLVM verifies its input anyway
        target_level(module, processor)
    return module


def engine_of(llvm: Any, libraries: tuple[str, ...]) -> Any:
    """Create MLIR's execution engine for a module of the LLVM dialect."""
    from torch_mlir.execution_engine import ExecutionEngine
    from torch_mlir.ir import Location

    open_globally(libraries)
    with llvm.context, Location.unknown():
        try:
            options: dict[str, Any] = {"shared_libs": list(libraries), "enable_pic": True}
            return ExecutionEngine(llvm, opt_level=OPT_LEVEL, **options)
        except RuntimeError as error:
            raise BackendError(
                f"mlir: LLVM does not compile this module: {' '.join(str(error).split())[:300]}"
            ) from None


@cache
def linker() -> tuple[str, ...] | None:
    """Return the command that links a shared object, without the names of files; None if this machine has no linker."""
    for name in ("cc", "gcc", "clang"):
        if path := shutil.which(name):
            return (path, "-shared", "-Wl,-Bsymbolic")
    for name in ("ld", "ld.lld"):
        if path := shutil.which(name):
            return (path, "-shared", "-Bsymbolic")
    return None


def _linked(engine: Any, entry: str, level: Level) -> bytes | None:
    command = linker()
    if command is None:
        return None
    mathematics = ["-lm"] if "-Wl,-Bsymbolic" in command else []
    with tempfile.TemporaryDirectory() as folder:
        compiled, shared = f"{folder}/kernel.o", f"{folder}/kernel.so"
        with capture_native_errors() as said:
            engine.dump_to_object_file(compiled)
        if said.missing_symbols:
            raise BackendError(
                f"mlir: {entry} for level {level} calls {', '.join(said.missing_symbols)}, which nothing here provides"
            )
        if not Path(compiled).exists():
            message = " ".join(said.text.split())[:300] or "and LLVM does not say why"
            raise BackendError(f"mlir: {entry} for level {level} was not compiled: {message}")
        line = [*command, compiled, "-o", shared, *mathematics]
        run = subprocess.run(line, capture_output=True, text=True, check=False)
        if run.returncode:
            raise BackendError(f"mlir: the linker failed: {' '.join(run.stderr.split())[:300]}")
        return Path(shared).read_bytes()
