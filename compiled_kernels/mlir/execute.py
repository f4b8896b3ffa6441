"""Compiled code in this process, called on the tensors' own memory: bare pointers, no copies, no allocation.

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

# There is one standard error for all threads; a thread may come in again, as where what is compiled compiles.
_ONE_AT_A_TIME = threading.RLock()
_LLVM = re.compile(r"\s*(JIT session error:|Could not compile |Failed to materialize symbols:)")


class CapturedErrors:
    """Captured messages: `text` is set once the block has ended."""

    text = ""

    @property
    def missing_symbols(self) -> tuple[str, ...]:
        """Return the symbols that compiled code calls and nothing provides, as LLVM's JIT lists them."""
        lists = re.findall(r"Symbols not found: \[ (.*?) \]", self.text)
        return tuple(dict.fromkeys(symbol for each in lists for symbol in each.split(", ")))


@contextmanager
def capture_native_errors() -> Iterator[CapturedErrors]:
    """Capture what native code writes to file descriptor 2 meanwhile. Lines that are not LLVM's are passed on
    afterwards: another thread may have written them."""
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
    """Machine code, in memory."""

    def packed_address(self, function: str) -> int:
        """Return address of `void(void **arguments)`: each argument is a pointer to its value."""
        ...

    def callable(self, function: str, arguments: int) -> Callable[..., None]:
        """Return `function` taking that many addresses."""
        ...


class SharedObject:
    """Code in a shared object; neither MLIR nor LLVM is needed to run it."""

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
    """Code in MLIR's execution engine, for where no linker is at hand."""

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

    `digest` names the entry of the cache that holds the code and its stages: what is shown is what runs.
    """

    entry: str
    digest: str
    code: Code
    library: Path | None
    texts: Mapping[str, str] | Path = field(repr=False)

    @property
    def address(self) -> int:
        """Return the address of `void(void **arguments)`: each argument is a pointer to its value (an address, a
        number)."""
        if (taken := _taken.get()) is not None:
            taken.append(self)
        return self.code.packed_address(self.entry)

    def function(self, arguments: int, name: str | None = None) -> Callable[..., None]:
        """Return a callable of `arguments` addresses (`tensor.data_ptr()`); about a microsecond a call, and no lock is
        held."""
        return self.code.callable(name or self.entry, arguments)

    @cached_property
    def stages(self) -> dict[str, str]:
        """Return the text of each stage the code went through; `asm` is what the shared object holds."""
        texts = json.loads(self.texts.read_text()) if isinstance(self.texts, Path) else self.texts
        assembly = "" if self.library is None else _disassembled(self.library)
        return {**texts, **({"asm": assembly} if assembly else {})}


_taken: ContextVar[list[Kernel] | None] = ContextVar("taken", default=None)


@contextmanager
def kernels_taken() -> Iterator[list[Kernel]]:
    """Give a list of the kernels whose addresses are taken in this context, to be called."""
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
