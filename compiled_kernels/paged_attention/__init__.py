from compiled_kernels.paged_attention.api import PagedKV, paged_attention, unsupported_reason

__all__ = ["PagedKV", "paged_attention", "unsupported_reason"]
