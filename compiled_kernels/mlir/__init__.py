"""The lane `mlir`: lower, compile, execute, and the cache of artifacts.

Importing this package imports neither torch-mlir nor IREE; what is compiled already needs neither to run.
"""

from compiled_kernels.mlir.compile import compile_text
from compiled_kernels.mlir.execute import Kernel

__all__ = ["Kernel", "compile_text"]
