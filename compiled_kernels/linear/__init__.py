from compiled_kernels.linear.api import linear, linear_int4, linear_int8

__all__ = ["linear", "linear_int4", "linear_int8"]
