"""A whole decode step in MLIR. Imports torch-mlir only when it compiles."""

from compiled_kernels.decode_step.shape import LayerShape, Packing, StepShape, Weight
from compiled_kernels.decode_step.step import DecodeStep

__all__ = ["DecodeStep", "LayerShape", "Packing", "StepShape", "Weight"]
