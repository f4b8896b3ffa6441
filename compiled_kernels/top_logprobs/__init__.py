from compiled_kernels.top_logprobs.api import log_softmax, top_logprobs

__all__ = ["log_softmax", "top_logprobs"]
