from compiled_kernels.gated.api import gated_clamped, gated_gelu, gated_silu

__all__ = ["gated_clamped", "gated_gelu", "gated_silu"]
