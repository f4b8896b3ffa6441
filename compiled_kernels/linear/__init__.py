from compiled_kernels.linear.api import linear, linear_quantized

__all__ = ["linear", "linear_quantized"]
