"""Run attention over quantized pages on the backend triton: each tile is unpacked in registers, once for all query
heads of a kv_head."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_kernels.backends import BackendError
from compiled_kernels.quantized_attention.quantize import QuantizedTensor
from compiled_kernels.triton_code.attention_launches import MIN_DOT_SIZE, AttentionLaunches
from compiled_kernels.triton_code.launch import KernelLaunch, check, power_of_two, run
from compiled_kernels.triton_code.quantized import FORMAT_NUMBERS
from compiled_kernels.triton_code.quantized_attention import attend_quantized

MAX_TILE_KEYS = 64


def plan(
    q: Tensor,
    keys: QuantizedTensor,
    values: QuantizedTensor,
    residual_keys: Tensor,
    residual_values: Tensor,
    quantized_table: Tensor,
    residual_table: Tensor,
    span_starts: Tensor,
    context_lengths: Tensor,
    group: int,
    lag: int,
    first: int,
    scale: float,
    window: int,
    sinks: int,
    decode_only: bool,
    softcap: float,
    sink_logits: Tensor | None,
    tile: int | None = None,
    splits: int | None = None,
) -> tuple[list[KernelLaunch], Tensor]:
    """Plan the launches of attention over quantized pages; `tile` (keys, a power of two that divides a page) and
    `splits` are chosen by shape unless given."""
    tokens, heads, dim = q.shape
    groups, size = residual_keys.shape[1:3]
    seqs, held = residual_table.shape
    padded = power_of_two(dim, MIN_DOT_SIZE)
    step = tile or min(MAX_TILE_KEYS, size & -size)
    check("quantized_attention", q, residual_keys, residual_values, sink_logits)
    _check(q, keys, values, residual_keys, residual_values, window, sinks, first)
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if decode_only else q.new_zeros(q.shape)
    spans = {
        "span_starts": span_starts, "sink_logits": q if sink_logits is None else sink_logits, "out": out,
        "seqs": seqs, "heads": heads, "dim": dim, "DIM": padded, "WHOLE_DIM": padded == dim,
    }  # fmt: skip
    walk = {
        "q": q, "residual_keys": residual_keys, "residual_values": residual_values, "quantized_table": quantized_table,
        "residual_table": residual_table, "context_lengths": context_lengths,
        "quantized_stride": quantized_table.stride(0), "recent_stride": residual_table.stride(0),
        "q_token": q.stride(0), "q_head": q.stride(1), "q_dim": q.stride(2),
        "recent_page": residual_keys.stride(0), "recent_group": residual_keys.stride(1),
        **_pages("key", keys), **_pages("value", values),
        "scale": scale, "softcap": softcap, "window": window, "sinks": sinks,
        "SHARE": heads // groups, "STEP": step, "TILE": max(step, MIN_DOT_SIZE), "SIZE": size,
        "KEYS": FORMAT_NUMBERS[keys.kind], "VALUES": FORMAT_NUMBERS[values.kind], "RUN": group,
        "LAG": lag, "FIRST": first,
        "COLUMNS": padded if values.scales is None else _columns(values, padded),
        "WINDOW": window > 0, "SOFTCAP": softcap > 0,
    }  # fmt: skip
    reach = min(held * size, window + sinks) if window else held * size
    walks = AttentionLaunches(attend_quantized, spans, walk, q, groups, reach, step, sink_logits is not None, splits)
    return walks.launches(decode_only), out


def _pages(name: str, packed: QuantizedTensor) -> dict[str, object]:
    """Return the tensors of quantized pages and their strides: of words, but of numbers where they are dense."""
    codes, scales, minima = packed
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


def _check(
    q: Tensor, keys: QuantizedTensor, values: QuantizedTensor, residual_keys: Tensor, residual_values: Tensor,
    window: int, sinks: int, first: int,
) -> None:  # fmt: skip
    what = "quantized_attention: backend triton"
    if not all(part.is_contiguous() for part in (*keys.tensors, *values.tensors, residual_keys, residual_values)):
        raise BackendError(f"{what} reads contiguous pages")
    if window and sinks > first:
        raise BackendError(f"{what} keeps a window's {sinks} sinks in full precision; the first {first} positions are")


def quantized_attention(
    q: Tensor,
    key_codes: Tensor,
    key_scales: Tensor | None,
    key_minima: Tensor | None,
    value_codes: Tensor,
    value_scales: Tensor | None,
    value_minima: Tensor | None,
    residual_keys: Tensor,
    residual_values: Tensor,
    quantized_table: Tensor,
    residual_table: Tensor,
    span_starts: Tensor,
    context_lengths: Tensor,
    group: int,
    lag: int,
    first: int,
    scale: float,
    window: int,
    sinks: int,
    decode_only: bool,
    softcap: float,
    sink_logits: Tensor | None,
    alibi: bool,
) -> Tensor:
    if alibi:
        raise BackendError("quantized_attention: backend triton knows no score functions, not ALiBi")
    keys, values = (
        QuantizedTensor(key_codes, key_scales, key_minima),
        QuantizedTensor(value_codes, value_scales, value_minima),
    )
    return run(
        *plan(
            q, keys, values, residual_keys, residual_values, quantized_table, residual_table, span_starts,
            context_lengths, group, lag, first, scale, window, sinks, decode_only, softcap, sink_logits,
        )
    )  # fmt: skip
