"""Operators of a decoder model, each with a specification and the backends that implement it.

Operators take and return tensors; this package never imports `workbench`.
"""

from compiled_kernels.backends import Backend, BackendError, backend_problems
from compiled_kernels.expert_linear import expert_linear
from compiled_kernels.gated import gated_clamped, gated_gelu, gated_silu
from compiled_kernels.kv_write import kv_write
from compiled_kernels.level import limit_libraries
from compiled_kernels.linear import linear, linear_quantized
from compiled_kernels.paged_attention import paged_attention
from compiled_kernels.quantized_attention import quantized_attention
from compiled_kernels.rms_norm import add_rms_norm, rms_norm
from compiled_kernels.rotary import rotary
from compiled_kernels.top_logprobs import log_softmax, top_logprobs

__all__ = [
    "Backend",
    "BackendError",
    "add_rms_norm",
    "expert_linear",
    "gated_clamped",
    "gated_gelu",
    "gated_silu",
    "kv_write",
    "backend_problems",
    "linear",
    "linear_quantized",
    "log_softmax",
    "paged_attention",
    "quantized_attention",
    "rms_norm",
    "rotary",
    "top_logprobs",
]

limit_libraries()  # before torch's and oneDNN's first operation, when they read their limits
