"""The backend mlir of attention over quantized pages: INT8, INT4 and FP8, decodes and longer spans alike, token by token."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from compiled_kernels.backends import BackendError
from compiled_kernels.cases import Case
from compiled_kernels.masks import window_and_sinks
from compiled_kernels.mlir import Kernel, compile_text
from compiled_kernels.mlir.invoke import BoundCall, libgomp_path
from compiled_kernels.mlir_text import MLIR_TYPES, THREADS, Target, exp_function
from compiled_kernels.quantized_attention.mlir_decode import attention_text, entry_text
from compiled_kernels.quantized_attention.mlir_shape import QuantizedAttention
from compiled_kernels.quantized_attention.quantize import SCALED_FORMATS, QuantizedTensor

MIN_ITEMS_PER_THREAD = 8  # with fewer rows times groups a thread, the context is split too


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
    keys, values = (
        QuantizedTensor(key_codes, key_scales, key_minima),
        QuantizedTensor(value_codes, value_scales, value_minima),
    )
    _check(q, keys, values, residual_keys, window, sinks, first)
    tokens, heads, dim = q.shape
    threads = torch.get_num_threads()
    groups, size = residual_keys.shape[1:3]
    shape = QuantizedAttention(
        num_heads=heads, num_kv_heads=groups, head_dim=dim, page_size=size, dtype=MLIR_TYPES[q.dtype], scale=scale, target=Target.current(),
        window=window, sinks=sinks, softcap=softcap, sink_logits=sink_logits is not None,
        chunks=threads if tokens * groups < MIN_ITEMS_PER_THREAD * threads else 1,
        key_format=keys.kind, value_format=values.kind, tokens_per_scale=group, columns_per_scale=_columns(values), residual_length=lag, num_sink_tokens=first,
    )  # fmt: skip
    if decode_only:
        owners, lengths = torch.arange(tokens, dtype=torch.int32), context_lengths.int()
    else:
        owners, lengths = _rows(span_starts, context_lengths, tokens)
    partial = torch.empty(tokens, heads, shape.chunks, dim + 2)
    mixed = torch.empty(tokens, heads, dim, dtype=q.dtype)
    tables = quantized_table.int().contiguous(), residual_table.int().contiguous()
    sizes = torch.tensor([tokens, tables[0].shape[1], tables[1].shape[1]], dtype=torch.int32)
    logits = () if sink_logits is None else (sink_logits.float(),)
    pages = *keys.kernel_tensors, *values.kernel_tensors, residual_keys, residual_values
    arguments = q.contiguous(), *pages, *tables, owners, lengths, sizes, partial, *logits, mixed
    BoundCall(_compiled(shape).address, arguments)()
    return mixed


def _rows(span_starts: Tensor, context_lengths: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Return for each token its sequence, and how many positions it is the last of."""
    starts = span_starts.int()
    owners = torch.repeat_interleave(torch.arange(len(context_lengths), dtype=torch.int32), starts[1:] - starts[:-1])
    ends = (context_lengths.int() - starts[1:])[owners]
    return owners, (ends + torch.arange(1, tokens + 1, dtype=torch.int32)).contiguous()


def _columns(values: QuantizedTensor) -> int:
    return values.codes.shape[-2] // values.scales.shape[-2] if values.scales is not None else 0


def _check(
    q: Tensor, keys: QuantizedTensor, values: QuantizedTensor, recent: Tensor, window: int, sinks: int, first: int
) -> None:
    what = "quantized_attention: backend mlir"
    if q.dtype != recent.dtype or q.dtype not in (torch.float32, torch.bfloat16):
        raise BackendError(f"{what} wants queries and recent keys in one of float32 and bfloat16, "
                        f"not {q.dtype} and {recent.dtype}")  # fmt: skip
    if keys.kind not in SCALED_FORMATS or values.kind not in SCALED_FORMATS:
        raise BackendError(f"{what} reads keys and values that are both packed, not {keys.kind} and {values.kind}")
    if window and sinks > first:
        raise BackendError(f"{what} keeps a window's {sinks} sinks in full precision; the first {first} positions are")


def stages(case: Case, operator: str = "quantized_attention") -> Mapping[str, str]:
    """Return every stage of the function that runs for `case`."""
    of = case.arguments
    window, sinks = window_and_sinks(of["mask"], "mlir") if "mask" in of else (0, 0)
    rows, threads = sum(of["spans"]), torch.get_num_threads()
    shape = QuantizedAttention(
        num_heads=of["num_kv_heads"] * of["queries_per_kv"], num_kv_heads=of["num_kv_heads"], head_dim=of["dim"], page_size=of["size"], dtype=MLIR_TYPES[of["dtype"]],
        scale=of["dim"] ** -0.5, target=Target.current(), window=window, sinks=sinks, softcap=of.get("softcap", 0.0),
        sink_logits=of.get("sinks", False), chunks=threads if rows * of["num_kv_heads"] < MIN_ITEMS_PER_THREAD * threads else 1,
        key_format=of["formats"][0], value_format=of["formats"][1], tokens_per_scale=of["run"], columns_per_scale=min(of["columns"], of["dim"]),
        residual_length=of["lag"], num_sink_tokens=of.get("first", 0),
    )  # fmt: skip
    return _compiled(shape).stages


@functools.lru_cache(maxsize=512)
def _compiled(shape: QuantizedAttention) -> Kernel:
    text = "\n".join((THREADS, exp_function(shape.lanes), attention_text(shape, "attend"), entry_text(shape)))
    return compile_text(text, "quantized_attention", level=shape.target.level, libraries=(libgomp_path(),))
