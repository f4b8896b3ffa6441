"""The backend mlir of the product: one of those in linear/mlir.py, whose rows are quantized by the same call."""

from compiled_kernels.linear.mlir import linear_w8a8, stages

__all__ = ["linear_w8a8", "stages"]
