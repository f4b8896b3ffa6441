from compiled_kernels.paged_attention.api import paged_attention, unsupported_reason
from compiled_kernels.paged_attention.reference import PagedKV

__all__ = ["PagedKV", "paged_attention", "unsupported_reason"]
