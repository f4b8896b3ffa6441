"""Run compiled code in this process on the tensors' own memory: bare pointers, no copies, no allocation.

LLVM's messages on standard error, which MLIR's bindings do not raise, are captured and become errors.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from compiled_kernels.backends import BackendError
from compiled_kernels.mlir.pipeline import PACKED_PREFIX

# All threads share one standard error. The lock is reentrant, because a compilation may start another.
_ONE_AT_A_TIME = threading.RLock()
_LLVM = re.compile(r"\s*(JIT session error:|Could not compile |Failed to materialize symbols:)")


class CapturedErrors:
    """Messages of native code, captured in a `with` block; `text` is set at the end of the block."""

    text = ""

    @property
    def missing_symbols(self) -> tuple[str, ...]:
        """Return the symbols that compiled code calls but no library provides, as LLVM's JIT lists them."""
        lists = re.findall(r"Symbols not found: \[ (.*?) \]", self.text)
        return tuple(dict.fromkeys(symbol for each in lists for symbol in each.split(", ")))


@contextmanager
def capture_native_errors() -> Iterator[CapturedErrors]:
    """Capture what native code writes to file descriptor 2 in this context. Lines that are not LLVM's are passed on
    afterwards, because another thread may have written them."""
    said = CapturedErrors()
    with ExitStack() as held:
        held.enter_context(_ONE_AT_A_TIME)
        try:
            kept = os.dup(2)
        except OSError:  # closed, as where there is no console: there is nothing to keep
            yield said
            return
        file = held.enter_context(tempfile.TemporaryFile())
        if sys.stderr is not None and not sys.stderr.closed:
            sys.stderr.flush()
        os.dup2(file.fileno(), 2)
        try:
            yield said
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            said.text = file.read().decode(errors="replace")
            others = [line for line in said.text.splitlines(keepends=True) if not _LLVM.match(line)]
            if "".join(others).strip():
                os.write(2, "".join(others).encode())


class Code(Protocol):
    """Machine code loaded in memory: the interface of its two forms."""

    def packed_address(self, function: str) -> int:
        """Return the address of `function` in the form `void(void **arguments)`: each argument is a pointer to its
        value.
        """
        ...

    def callable(self, function: str, arguments: int) -> Callable[..., None]:
        """Return `function` as a Python callable that takes `arguments` addresses."""
        ...


class SharedObject:
    """Machine code in a shared object, which runs without MLIR and LLVM."""

    def __init__(self, path: Path, libraries: tuple[str, ...] = ()):
        open_globally(libraries)
        self.library = ctypes.CDLL(str(path))

    def packed_address(self, function: str) -> int:
        return ctypes.cast(self._found(f"{PACKED_PREFIX}{function}"), ctypes.c_void_p).value or 0

    def callable(self, function: str, arguments: int) -> Callable[..., None]:
        call = self._found(function)
        call.argtypes, call.restype = [ctypes.c_void_p] * arguments, None
        return call

    def _found(self, symbol: str) -> Any:
        try:
            return self.library[symbol]
        except AttributeError:
            raise BackendError(
                f"mlir: the compiled module has no function {symbol.removeprefix(PACKED_PREFIX)!r}"
            ) from None


class JITCode:
    """Machine code in MLIR's execution engine, used if no linker is available."""

    def __init__(self, engine: Any):
        self.engine = engine

    def packed_address(self, function: str) -> int:
        with capture_native_errors() as said:
            address = self.engine.raw_lookup(function)
        if said.missing_symbols:
            raise BackendError(f"mlir: {function} calls {', '.join(said.missing_symbols)}, which nothing here provides")
        if not address:
            raise BackendError(f"mlir: the compiled module has no function {function!r}")
        return address

    def callable(self, function: str, arguments: int) -> Callable[..., None]:
        call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.packed_address(function))
        pointers = ctypes.c_void_p * arguments
        step = ctypes.sizeof(ctypes.c_void_p)

        def run(*addresses: int) -> None:
            values = pointers(*addresses)
            first = ctypes.addressof(values)
            call(pointers(*range(first, first + arguments * step, step)))

        return run


@dataclass(frozen=True)
class Kernel:
    """One function of compiled code.

    `digest` names the cache entry with the code and its stages, so that the stages shown are those of the code that
    runs.
    """

    entry: str
    digest: str
    code: Code
    library: Path | None
    texts: Mapping[str, str] | Path = field(repr=False)

    @property
    def address(self) -> int:
        """Return the address of the kernel in the form `void(void **arguments)`: each argument is a pointer to its
        value (an address, a number)."""
        if (taken := _taken.get()) is not None:
            taken.append(self)
        return self.code.packed_address(self.entry)

    def function(self, arguments: int, name: str | None = None) -> Callable[..., None]:
        """Return the kernel as a Python callable that takes `arguments` addresses (`tensor.data_ptr()`). A call takes
        about a microsecond and holds no lock."""
        return self.code.callable(name or self.entry, arguments)

    @cached_property
    def stages(self) -> dict[str, str]:
        """Return the text of each compilation stage; `asm` is the assembly of the shared object."""
        texts = json.loads(self.texts.read_text()) if isinstance(self.texts, Path) else self.texts
        assembly = "" if self.library is None else _disassembled(self.library)
        return {**texts, **({"asm": assembly} if assembly else {})}


_taken: ContextVar[list[Kernel] | None] = ContextVar("taken", default=None)


@contextmanager
def kernels_taken() -> Iterator[list[Kernel]]:
    """Yield a list that receives each kernel whose address is requested in this context."""
    taken: list[Kernel] = []
    before = _taken.set(taken)
    try:
        yield taken
    finally:
        _taken.reset(before)


def open_globally(libraries: tuple[str, ...]) -> None:
    for library in libraries:
        ctypes.CDLL(library, ctypes.RTLD_GLOBAL)


def _disassembled(library: Path) -> str:
    tool = shutil.which("objdump") or shutil.which("llvm-objdump")
    if tool is None:
        return ""
    command = [tool, "-d", "--no-show-raw-insn", str(library)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout
