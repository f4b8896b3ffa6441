"""A whole decode step compiled from MLIR. This package imports torch-mlir only when it compiles."""

from compiled_kernels.decode_step.shape import LayerShape, MixtureShape, StepShape, WeightLayout
from compiled_kernels.decode_step.step import DecodeStep, DecodeSteps
from compiled_kernels.quantized_attention.mlir_shape import QuantizedLayout

__all__ = [
    "DecodeStep",
    "DecodeSteps",
    "LayerShape",
    "MixtureShape",
    "QuantizedLayout",
    "StepShape",
    "WeightLayout",
]
