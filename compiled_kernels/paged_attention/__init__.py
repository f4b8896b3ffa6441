from compiled_kernels.paged_attention.api import paged_attention, unsupported_reason

__all__ = [
    "paged_attention",
    "unsupported_reason",
]
