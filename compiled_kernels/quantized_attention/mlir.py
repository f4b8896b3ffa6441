"""Run attention over quantized pages on the backend mlir: INT8, INT4 and FP8."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_kernels.attention import AttentionParameters, Spans
from compiled_kernels.backends import BackendError
from compiled_kernels.paged_attention.mlir import attend
from compiled_kernels.quantized_attention.api import QuantizedKV, check_sinks
from compiled_kernels.quantized_attention.mlir_context import QuantizedContext
from compiled_kernels.quantized_attention.mlir_shape import (
    QuantizedAttention,
    QuantizedLayout,
    QuantizedSpan,
)

NAME = "quantized_attention"


def quantized_attention(q: Tensor, kv: QuantizedKV, spans: Spans, parameters: AttentionParameters) -> Tensor:
    pages = kv.residual_keys, kv.residual_values, *kv.keys.kernel_tensors, *kv.values.kernel_tensors
    return attend(NAME, _context, q, kv, pages, spans, parameters)


def _context(q: Tensor, kv: QuantizedKV, parameters: AttentionParameters, decodes: bool) -> QuantizedContext:
    """Return the description of the keys and values read. Raises BackendError if no kernel supports them."""
    what, recent, (keys, values, rule) = f"{NAME}: backend mlir", kv.residual_keys, (kv.keys, kv.values, kv.rule)
    if q.dtype != recent.dtype or q.dtype not in (torch.float32, torch.bfloat16):
        wanted = "needs queries and recent keys in float32, or both in bfloat16"
        raise BackendError(f"{what} {wanted}, not {q.dtype} and {recent.dtype}")
    if keys.scales is None or values.scales is None:
        raise BackendError(f"{what} needs keys and values both quantized, not {keys.kind} and {values.kind}")
    codes, scales, _ = values.kernel_tensors
    layout = QuantizedLayout(keys.kind, values.kind, codes.shape[-2] // scales.shape[-2], rule)
    kind = QuantizedAttention if decodes else QuantizedSpan
    shape = kind.from_tensors(NAME, q, recent, parameters, layout=layout)
    check_sinks(NAME, "mlir", rule, shape.sliding_window, shape.num_sink_tokens)
    return QuantizedContext(shape)
