from compiled_kernels.gated.api import gated_silu

__all__ = ["gated_silu"]
