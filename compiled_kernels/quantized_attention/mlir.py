"""The lane mlir of attention over quantized pages: INT8, INT4 and FP8, decodes and longer spans alike, token by token."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from compiled_kernels.cases import Case
from compiled_kernels.lanes import LaneError
from compiled_kernels.masks import band
from compiled_kernels.mlir import Kernel, compile_text
from compiled_kernels.mlir_text import THREADS, TYPES, Target, exp_function
from compiled_kernels.openmp import Call, library
from compiled_kernels.quantized_attention.mlir_shape import QuantizedAttention
from compiled_kernels.quantized_attention.mlir_text import attention_text, entry_text
from compiled_kernels.quantized_attention.packed import SCALED, Packed

FEW = 8  # with fewer rows times groups a thread, the context is split too


def quantized_attention(
    q: Tensor,
    key_codes: Tensor,
    key_scales: Tensor | None,
    key_minima: Tensor | None,
    value_codes: Tensor,
    value_scales: Tensor | None,
    value_minima: Tensor | None,
    recent_keys: Tensor,
    recent_values: Tensor,
    packed_table: Tensor,
    recent_table: Tensor,
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
    keys, values = Packed(key_codes, key_scales, key_minima), Packed(value_codes, value_scales, value_minima)
    _check(q, keys, values, recent_keys, window, sinks, first)
    tokens, heads, dim = q.shape
    threads = torch.get_num_threads()
    groups, size = recent_keys.shape[1:3]
    shape = QuantizedAttention(
        heads=heads, groups=groups, dim=dim, size=size, kind=TYPES[q.dtype], scale=scale, target=Target.here(),
        window=window, sinks=sinks, softcap=softcap, sink_logits=sink_logits is not None,
        chunks=threads if tokens * groups < FEW * threads else 1,
        key_kind=keys.kind, value_kind=values.kind, key_run=group, value_run=_columns(values), lag=lag, first=first,
    )  # fmt: skip
    if decode_only:
        owners, lengths = torch.arange(tokens, dtype=torch.int32), context_lengths.int()
    else:
        owners, lengths = _rows(span_starts, context_lengths, tokens)
    partial = torch.empty(tokens, heads, shape.chunks, dim + 2)
    mixed = torch.empty(tokens, heads, dim, dtype=q.dtype)
    tables = packed_table.int().contiguous(), recent_table.int().contiguous()
    sizes = torch.tensor([tokens, tables[0].shape[1], tables[1].shape[1]], dtype=torch.int32)
    logits = () if sink_logits is None else (sink_logits.float(),)
    pages = *keys.three, *values.three, recent_keys, recent_values
    arguments = q.contiguous(), *pages, *tables, owners, lengths, sizes, partial, *logits, mixed
    Call(_compiled(shape).address, arguments)()
    return mixed


def _rows(span_starts: Tensor, context_lengths: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Return for each token its sequence, and how many positions it is the last of."""
    starts = span_starts.int()
    owners = torch.repeat_interleave(torch.arange(len(context_lengths), dtype=torch.int32), starts[1:] - starts[:-1])
    ends = (context_lengths.int() - starts[1:])[owners]
    return owners, (ends + torch.arange(1, tokens + 1, dtype=torch.int32)).contiguous()


def _columns(values: Packed) -> int:
    return values.codes.shape[-2] // values.scales.shape[-2] if values.scales is not None else 0


def _check(q: Tensor, keys: Packed, values: Packed, recent: Tensor, window: int, sinks: int, first: int) -> None:
    what = "quantized_attention: lane mlir"
    if q.dtype != recent.dtype or q.dtype not in (torch.float32, torch.bfloat16):
        raise LaneError(f"{what} wants queries and recent keys in one of float32 and bfloat16, "
                        f"not {q.dtype} and {recent.dtype}")  # fmt: skip
    if keys.kind not in SCALED or values.kind not in SCALED:
        raise LaneError(f"{what} reads keys and values that are both packed, not {keys.kind} and {values.kind}")
    if window and sinks > first:
        raise LaneError(f"{what} keeps a window's {sinks} sinks in full precision; the first {first} positions are")


def stages(case: Case, operator: str = "quantized_attention") -> Mapping[str, str]:
    """Return every stage of the function that runs for `case`."""
    of = case.arguments
    window, sinks = band(of["mask"], "mlir") if "mask" in of else (0, 0)
    rows, threads = sum(of["spans"]), torch.get_num_threads()
    shape = QuantizedAttention(
        heads=of["groups"] * of["share"], groups=of["groups"], dim=of["dim"], size=of["size"], kind=TYPES[of["dtype"]],
        scale=of["dim"] ** -0.5, target=Target.here(), window=window, sinks=sinks, softcap=of.get("softcap", 0.0),
        sink_logits=of.get("sinks", False), chunks=threads if rows * of["groups"] < FEW * threads else 1,
        key_kind=of["formats"][0], value_kind=of["formats"][1], key_run=of["run"], value_run=min(of["columns"], of["dim"]),
        lag=of["lag"], first=of.get("first", 0),
    )  # fmt: skip
    return _compiled(shape).stages


@functools.lru_cache(maxsize=512)
def _compiled(shape: QuantizedAttention) -> Kernel:
    text = "\n".join((THREADS, exp_function(shape.lanes), attention_text(shape, "attend"), entry_text(shape)))
    return compile_text(text, "quantized_attention", level=shape.target.level, libraries=(library(),))
