"""The backend `mlir`: lowering, compilation, execution, and the cache of compiled code.

Importing this package does not import torch-mlir, and code that is already compiled runs without it.
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
    """Return the compilation stages of the code that runs a case, with the digest of its compiled code (see
    show.py).
    """
    from compiled_kernels.mlir import show

    return show.stages(operator, case)
