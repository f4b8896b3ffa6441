"""The backend mlir of attention over quantized pages: INT8, INT4 and FP8, decodes and spans alike, token by token."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from compiled_kernels.attention import AttentionParameters, Spans
from compiled_kernels.backends import BackendError
from compiled_kernels.cases import Case, suite_of
from compiled_kernels.mlir import Kernel, compile_entry
from compiled_kernels.paged_attention.mlir import attend_rows_of
from compiled_kernels.paged_attention.mlir_decode import attend_rows
from compiled_kernels.paged_attention.mlir_shape import num_chunks
from compiled_kernels.quantized_attention.api import QuantizedKV, check_sinks
from compiled_kernels.quantized_attention.mlir_decode import QuantizedContext
from compiled_kernels.quantized_attention.mlir_shape import QuantizedAttention, QuantizedLayout
from compiled_kernels.quantized_attention.quantize import SCALED_FORMATS, QuantizedTensor

NAME = "quantized_attention"


def quantized_attention(q: Tensor, kv: QuantizedKV, spans: Spans, parameters: AttentionParameters) -> Tensor:
    shape = _shape(q, kv, parameters)
    if spans.decode_only:
        rows = torch.arange(len(q), dtype=torch.int32), spans.context_lengths.int()
    else:
        rows = _rows(spans, len(q))
    pages = kv.residual_keys, kv.residual_values, *kv.keys.kernel_tensors, *kv.values.kernel_tensors
    return attend_rows_of(_compiled(shape), shape, q, pages, kv.tables[::-1], rows, parameters)


def _rows(spans: Spans, tokens: int) -> tuple[Tensor, Tensor]:
    """Return for each token its sequence, and how many positions it is the last of."""
    starts, lengths = spans.starts.int(), spans.context_lengths.int()
    owners = torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32), starts[1:] - starts[:-1])
    ends = (lengths - starts[1:])[owners]
    return owners, ends + torch.arange(1, tokens + 1, dtype=torch.int32)


def _columns(values: QuantizedTensor) -> int:
    return values.codes.shape[-2] // values.scales.shape[-2] if values.scales is not None else 0


def _shape(q: Tensor, kv: QuantizedKV, parameters: AttentionParameters) -> QuantizedAttention:
    """Return the shape of the kernel for these. Raises BackendError for what no kernel reads."""
    what, recent, (keys, values, rule) = f"{NAME}: backend mlir", kv.residual_keys, (kv.keys, kv.values, kv.rule)
    if q.dtype != recent.dtype or q.dtype not in (torch.float32, torch.bfloat16):
        wanted = "wants queries and recent keys in one of float32 and bfloat16"
        raise BackendError(f"{what} {wanted}, not {q.dtype} and {recent.dtype}")
    if keys.kind not in SCALED_FORMATS or values.kind not in SCALED_FORMATS:
        raise BackendError(f"{what} reads keys and values that are both quantized, not {keys.kind} and {values.kind}")
    layout = QuantizedLayout(keys.kind, values.kind, _columns(values), rule)
    chunks = num_chunks(len(q), recent.shape[1])
    shape = QuantizedAttention.from_tensors(NAME, q, recent, parameters, chunks=chunks, layout=layout)
    check_sinks(NAME, "mlir", rule, shape.sliding_window, shape.num_sink_tokens)
    return shape


def stages(case: Case, operator: str = NAME) -> Mapping[str, str]:
    """Return every stage of the function that runs for `case`."""
    q, kv, _, parameters = suite_of(operator).make_inputs(case)
    return _compiled(_shape(q, kv, parameters)).stages


@functools.lru_cache(maxsize=512)
def _compiled(shape: QuantizedAttention) -> Kernel:
    return compile_entry(NAME, shape.target.level, lambda: attend_rows(QuantizedContext(shape), NAME))
