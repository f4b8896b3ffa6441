"""The backend `mlir`: lower, compile, execute, and the cache of artifacts.

Importing this package does not import torch-mlir, and what is compiled already runs without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiled_kernels.mlir.compile import compile_entry, compile_function, compile_shape, compile_text
from compiled_kernels.mlir.execute import Kernel

if TYPE_CHECKING:
    from compiled_kernels.cases import Case
    from compiled_kernels.mlir.show import CompiledStages

__all__ = ["Kernel", "compile_entry", "compile_function", "compile_shape", "compile_text", "stages"]


def stages(operator: str, case: Case | None = None) -> CompiledStages:
    """Return the stages of the code that runs a case, with its artifact's digest (see show.py)."""
    from compiled_kernels.mlir import show

    return show.stages(operator, case)
