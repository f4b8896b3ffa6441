"""The two sides of a block's attention for many tokens, each one MLIR function. Imports torch-mlir only when it
compiles."""

from compiled_kernels.prefill.block import PrefillBlock
from compiled_kernels.prefill.shape import BlockShape

__all__ = ["BlockShape", "PrefillBlock"]
