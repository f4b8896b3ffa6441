"""Attention of packed spans over keys and values most of which lie quantized in pages (KIVI, Liu et al. 2024)."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from compiled_kernels.attention import AttentionParameters, Spans
from compiled_kernels.backends import Backend
from compiled_kernels.paged_attention.api import attend_on, define_attention
from compiled_kernels.quantized_attention.reference import QuantizedKV

QUANTIZED_ATTENTION = define_attention(
    "quantized_attention",
    QuantizedKV,
    "Tensor key_codes, Tensor? key_scales, Tensor? key_minima, Tensor value_codes, Tensor? value_scales,"
    " Tensor? value_minima, Tensor residual_keys, Tensor residual_values, Tensor quantized_table,"
    " Tensor residual_table, int quant_group, int residual_length, int num_sink_tokens",
)


def quantized_attention(
    q: Float[Tensor, "token head dim"],
    kv: QuantizedKV,
    spans: Spans,
    parameters: AttentionParameters,
    backend: Backend = Backend.EAGER,
) -> Float[Tensor, "token head dim"]:
    """Compute softmax(scale q kᵀ) v over quantized keys and values as their codes say, and over the residual ones in
    full precision; all else as in `paged_attention`.

    Raises:
        BackendError: for what the backend cannot express: triton and mlir know windows whose sinks are not quantized,
            and no score functions; mlir reads no dense keys beside quantized values.
    """
    return attend_on(QUANTIZED_ATTENTION, backend, q, kv, spans, parameters)
