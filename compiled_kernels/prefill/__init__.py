"""Compile the parts of a decoder block before and after attention for many tokens, each as one MLIR function. This
package imports torch-mlir only when it compiles."""

from compiled_kernels.prefill.block import PrefillBlock
from compiled_kernels.prefill.shape import BlockShape

__all__ = ["BlockShape", "PrefillBlock"]
