from compiled_kernels.linear.api import linear

__all__ = ["linear"]
