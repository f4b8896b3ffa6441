from compiled_kernels.linear_w8a8.api import linear_w8a8

__all__ = ["linear_w8a8"]
