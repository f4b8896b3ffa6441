"""A capture of LLVM's messages on the process's standard error, which MLIR's bindings do not raise."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

# There is one standard error for all threads; a thread may come in again, as where what is compiled compiles.
_ONE_AT_A_TIME = threading.RLock()


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


_LLVM = re.compile(r"\s*(JIT session error:|Could not compile |Failed to materialize symbols:)")
