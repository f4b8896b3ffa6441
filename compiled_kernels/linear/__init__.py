from compiled_kernels.linear.api import linear, linear_grouped, linear_int8, linear_quantized

__all__ = ["linear", "linear_grouped", "linear_int8", "linear_quantized"]
