from compiled_kernels.paged_attention.api import paged_attention, refusal

__all__ = ["paged_attention", "refusal"]
