"""Compute attention over quantized pages in Triton: each tile is unpacked in registers, once for all query heads of a
key/value head."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_kernels.attention import AttentionParameters, Spans
from compiled_kernels.backends import Backend, BackendError
from compiled_kernels.quantized_attention.api import QuantizedKV, check_sinks
from compiled_kernels.quantized_attention.quantize import QuantizedTensor
from compiled_kernels.triton_code.attention_launches import MIN_DOT_SIZE, AttentionLaunches
from compiled_kernels.triton_code.launch import KernelLaunch, check, power_of_two, run
from compiled_kernels.triton_code.quantized import FORMAT_NUMBERS
from compiled_kernels.triton_code.quantized_attention import attend_quantized

MAX_TILE_KEYS = 64


def plan(
    q: Tensor,
    kv: QuantizedKV,
    spans: Spans,
    parameters: AttentionParameters,
    tile: int | None = None,
    splits: int | None = None,
) -> tuple[list[KernelLaunch], Tensor]:
    """Plan the launches of attention over quantized pages; `tile` (keys, a power of two that divides a page) and
    `splits` are chosen by shape unless given."""
    rules = parameters.kernel_rules("quantized_attention", Backend.TRITON)
    keys, values, residual_keys, residual_values, quantized_table, residual_table, rule, _ = kv
    (groups, size), padded = residual_keys.shape[1:3], power_of_two(q.shape[2], MIN_DOT_SIZE)
    step = tile or min(MAX_TILE_KEYS, size & -size)
    check("quantized_attention", q, residual_keys, residual_values, parameters.sink_logits)
    if not all(part.is_contiguous() for part in (*keys.tensors, *values.tensors, residual_keys, residual_values)):
        raise BackendError("quantized_attention: backend triton reads contiguous pages")
    check_sinks("quantized_attention", Backend.TRITON, rule, *rules[:2])
    if unread := {keys.kind, values.kind} - FORMAT_NUMBERS.keys():
        raise BackendError(f"quantized_attention: backend triton reads {', '.join(FORMAT_NUMBERS)}, not {min(unread)}")
    walk = {
        "residual_keys": residual_keys, "residual_values": residual_values, "quantized_table": quantized_table,
        "residual_table": residual_table, "quantized_stride": quantized_table.stride(0),
        "recent_stride": residual_table.stride(0), "recent_page": residual_keys.stride(0),
        "recent_group": residual_keys.stride(1), **_pages("key", keys), **_pages("value", values),
        "STEP": step, "TILE": max(step, MIN_DOT_SIZE), "SIZE": size,
        "KEYS": FORMAT_NUMBERS[keys.kind], "VALUES": FORMAT_NUMBERS[values.kind], "RUN": rule.quant_group,
        "LAG": rule.residual_length, "FIRST": rule.num_sink_tokens,
        "COLUMNS": padded if values.scales is None else _columns(values, padded),
    }  # fmt: skip
    held = residual_table.shape[1] * size
    return AttentionLaunches(attend_quantized, q, spans, parameters, rules, groups, held, step, walk, splits).plan()


def _pages(name: str, quantized: QuantizedTensor) -> dict[str, object]:
    """Return the tensors of quantized pages and their strides: of words, but of numbers where they are dense."""
    codes, scales, minima = quantized
    words = codes if scales is None else codes.view(torch.int32)[..., 0]
    scales = codes if scales is None else scales
    return {
        f"{name}_codes": words, f"{name}_scales": scales, f"{name}_minima": scales if minima is None else minima,
        f"{name}_page": words.stride(0), f"{name}_group": words.stride(1),
        f"{name}_scale_page": scales.stride(0), f"{name}_scale_group": scales.stride(1),
    }  # fmt: skip


def _columns(values: QuantizedTensor, padded: int) -> int:
    """Return columns that share a scale; `padded` where all of a token's do."""
    assert values.scales is not None
    parts = values.scales.shape[-2]
    return padded if parts == 1 else values.codes.shape[-2] // parts


def quantized_attention(q: Tensor, kv: QuantizedKV, spans: Spans, parameters: AttentionParameters) -> Tensor:
    return run(*plan(q, kv, spans, parameters))
