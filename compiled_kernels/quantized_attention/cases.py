from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import compiled_kernels
from compiled_kernels.attention import AttentionParameters, attention_reference
from compiled_kernels.cases import Case, Suite, in_float64, random_normal
from compiled_kernels.masks import Causal, Mask, SlidingWindow
from compiled_kernels.paged_attention.cases import case as dense_case
from compiled_kernels.paged_attention.cases import page_table, spans_of, terms
from compiled_kernels.quantized_attention.api import QuantizedKV
from compiled_kernels.quantized_attention.pages import PageFormat, QuantizationRule, TokenGroups, quantize_pages
from compiled_kernels.quantized_attention.quantize import (
    INTEGER_BITS,
    QuantFormat,
    QuantizedTensor,
    bits_per_number,
    codes_per_word,
    dequantize,
)

Formats = tuple[QuantFormat, QuantFormat]  # formats of keys and of values
INTEGERS: tuple[Formats, ...] = tuple((kind, kind) for kind in INTEGER_BITS)
FORMATS: tuple[Formats, ...] = (*INTEGERS, ("fp8", "fp8"), ("dense", "int4"), ("dense", "dense"))


def inputs(
    generator: torch.Generator,
    contexts: Sequence[int],
    spans: Sequence[int],
    formats: Formats,
    num_kv_heads: int,
    queries_per_kv: int,
    dim: int,
    size: int,
    dtype: torch.dtype,
    run: int = 64,
    columns: int = 64,
    lag: int = 64,
    first: int = 0,
    mask: Mask = Causal(),  # noqa: B008 (a frozen value)
    softcap: float = 0.0,
    sinks: bool = False,
) -> tuple:
    """Draw spans over pages in random order. Memory that no query of this step reads is NaN, and unwritten codes are
    255."""
    rule, heads = QuantizationRule(run, lag, first), num_kv_heads * queries_per_kv
    q = random_normal(generator, dtype, (sum(spans), heads, dim))
    held = [-(-context // size) for context in contexts]
    tables = [page_table(generator, held) for _ in range(2)]
    whole = random_normal(generator, dtype, (2, sum(held) + 1, num_kv_heads, size, dim))
    recent = torch.full_like(whole, torch.nan)
    groups_settled = [
        (
            *(int(table[seq, at // size]) for table in (tables[1], tables[0])),
            at % size // run,
            min(run, max(0, first - at)),
        )
        for seq, context in enumerate(contexts)
        for at in range(0, rule.quantized_until(context), run)
    ]
    where = torch.tensor(groups_settled, dtype=torch.long).reshape(-1, 4).unbind(1)
    quantized = []
    for kind, keys, pages in zip(formats, (True, False), whole, strict=True):
        format = PageFormat(kind, keys, num_kv_heads, dim, size, run if keys else min(columns, dim))
        quantized.append(_unwritten(format, sum(held) + 1, dtype))
        quantize_pages([pages], quantized[-1:], format, TokenGroups(run, *where))
    for seq, (context, span) in enumerate(zip(contexts, spans, strict=True)):
        unsettled = rule.quantized_until(context - span + 1)
        for at in [*range(min(first, unsettled)), *range(unsettled, context)]:
            place = slice(None), int(tables[1][seq, at // size]), slice(None), at % size
            recent[place] = whole[place]
    sink_logits = random_normal(generator, torch.float32, (heads,)) if sinks else None
    kv = QuantizedKV(*quantized, *recent, *tables, rule=rule)
    return q, kv, spans_of(contexts, spans), AttentionParameters(dim**-0.5, mask, softcap, sink_logits)


def _unwritten(format: PageFormat, pages: int, dtype: torch.dtype) -> QuantizedTensor:
    """Return pages with all bytes 255, which is NaN in every float type."""
    quantized = format.empty(pages, dtype)
    for part in quantized.tensors:
        part.view(torch.uint8).fill_(255)
    return quantized


def case(
    name: str,
    contexts: Sequence[int],
    spans: Sequence[int],
    formats: Formats,
    dtype: torch.dtype,
    timed: bool = False,
    /,
    **more: Any,
) -> Case:
    more = {"formats": formats, "run": 64, "columns": 64, "lag": 64, **more}
    dense = dense_case(f"{name} {_name(formats)}", contexts, spans, dtype, timed, **more)
    rule = QuantizationRule(more["run"], more["lag"])
    runs = zip(formats, (more["run"], more["columns"]), strict=True)
    saved_bits = 16 * dtype.itemsize - sum(bits_per_number(kind, run, dtype) for kind, run in runs)
    settled = sum(rule.quantized_until(context) for context in contexts)
    numbers = settled * dense.arguments["num_kv_heads"] * dense.arguments["dim"]
    return replace(dense, cost=replace(dense.cost, bytes=dense.cost.bytes - int(numbers * saved_bits / 8)))


def _name(formats: Formats) -> str:
    return formats[0] if formats[0] == formats[1] else " keys, ".join(formats) + " values"


def size(*inputs: Any) -> Tensor:
    """Return, for each output, the sum of the absolute values that are added, so that the error bound is fair if a sum
    happens to cancel.
    """
    q, kv, spans, parameters = in_float64(inputs)
    values = QuantizedTensor(dequantize(kv.values, torch.float64).abs())
    kv = kv._replace(values=values, residual_values=kv.residual_values.abs())
    return attention_reference(q, kv, spans, parameters).amax(-1, keepdim=True)


def _small(formats: Formats) -> dict[str, Any]:
    """Return a small shape, a group of which is whole words of values."""
    word = codes_per_word(formats[1])
    side = max(16, word)
    return {"num_kv_heads": 2, "dim": side, "size": side, "run": max(8, word), "columns": side, "lag": 5}


def _cases():
    for dtype in (torch.float32, torch.bfloat16):
        for formats in FORMATS:
            small = _small(formats)
            yield case("decode 1 at 4096", (4096,), (1,), formats, dtype, formats in INTEGERS)
            yield case("decode 3 ragged", (1, 90, 300), (1, 1, 1), formats, dtype, size=32, run=32, columns=32, lag=16)
            yield case("mixed", (9, 70, 37, 5), (1, 1, 30, 3), formats, dtype, **small)
        for formats in INTEGERS:
            small = _small(formats)
            yield case("decode 16 at 512", (512,) * 16, (1,) * 16, formats, dtype, True)
            yield case("chunk 64 at 640", (640,), (64,), formats, dtype)
            yield case("decode window", (80, 30, 7), (1, 1, 1), formats, dtype, mask=SlidingWindow(21), **small)
            yield case("mixed window", (80, 40), (1, 9), formats, dtype, mask=SlidingWindow(21), **small)
            yield case("mixed, first 5 full", (80, 40, 9), (1, 30, 9), formats, dtype, first=5, **small)
            yield case("decode, first 20 full", (80, 27, 9), (1, 1, 1), formats, dtype, first=20, **small)
            window = SlidingWindow(21, num_sink_tokens=3)
            yield case("decode window and sinks", (80, 27), (1, 1), formats, dtype, mask=window, first=3, **small)
            changed = {"softcap": 3.0, "sinks": True, **small}
            yield case("mixed soft-cap and sink logits", (66, 8), (1, 8), formats, dtype, **changed)


SUITES = (
    Suite("quantized_attention", inputs, compiled_kernels.quantized_attention, tuple(_cases()), terms, scale=size),
)
