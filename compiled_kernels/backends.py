"""Define the backends that implement operators, and check which of them work on this machine."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sys
import sysconfig
from enum import StrEnum
from pathlib import Path

from compiled_kernels.level import current_level


class Backend(StrEnum):
    """An implementation of the operators.

    `eager` runs the specification, or an equivalent torch operation; `inductor` is the traced form compiled by
    torch.compile; `triton` is written by hand, for GPUs; `mlir` is written by hand or lowered from the specification by
    torch-mlir, for CPUs.
    """

    EAGER = "eager"
    INDUCTOR = "inductor"
    TRITON = "triton"
    MLIR = "mlir"


AUTO_BACKEND = "auto"
UNSUPPORTED_CPU = "its kernels need x86-64 with AVX2 and FMA, which this machine lacks; eager and inductor work here"


class BackendError(RuntimeError):
    """Raised if an explicitly selected backend cannot do the work here; there is no fallback."""

    def _render_traceback_(self) -> list[str]:
        """Return the text shown in a notebook cell: one line, as in workbench.errors; `%tb` shows the traceback."""
        shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        if sys.exc_info()[1] is self or shell is None:
            return [f"\033[31m{type(self).__name__}\033[0m: {self}"]
        return shell.InteractiveTB.structured_traceback(type(self), self, self.__traceback__)


def describe_callable(part: object) -> str:
    """Return the name of a mask or score function for messages: its repr or its name, never its memory address."""
    text = repr(part)
    if " at 0x" not in text:
        return text
    if isinstance(part, functools.partial):
        return (
            f"{describe_callable(part.func)} with "
            f"{', '.join(f'{name}={value!r}' for name, value in part.keywords.items())}"
        )
    return getattr(part, "__qualname__", type(part).__qualname__)


@functools.cache
def backend_problems() -> dict[Backend, str | None]:
    """Return for each backend why it does not work here; None if it works."""
    return {
        Backend.EAGER: None,
        Backend.INDUCTOR: _inductor_problem(),
        Backend.TRITON: _triton_problem(),
        Backend.MLIR: _mlir_problem(),
    }


def triton_interpreted() -> bool:
    """Return whether Triton kernels run in Triton's interpreter, on any device and slowly (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _inductor_problem() -> str | None:
    if not any(shutil.which(name) for name in ("g++", "clang++", "c++")):
        return "no C++ compiler found (install g++ or clang++)"
    include = sysconfig.get_path("include")
    if not include or not (Path(include) / "Python.h").exists():
        return "the headers of this Python are missing (install its development package, e.g. python3-dev)"
    return None


def _triton_problem() -> str | None:
    import torch

    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install 'inference-workbench[triton]'"
    if triton_interpreted() or torch.cuda.is_available():
        return None
    return "no CUDA device here (TRITON_INTERPRET=1 runs the kernels in Triton's interpreter, slowly)"


def _mlir_problem() -> str | None:
    if current_level() is None:
        return UNSUPPORTED_CPU
    if importlib.util.find_spec("torch_mlir") is None:
        return "torch-mlir is not installed: pip install torch-mlir"
    return None
