"""Decode attention, last: the chunks of every head put together (FlashDecoding, Dao et al. 2023)."""

from __future__ import annotations

from compiled_kernels.mlir_text import Lines
from compiled_kernels.paged_attention.mlir_shape import DecodeAttention


def merge(shape: DecodeAttention, name: str) -> str:
    """Emit @{name}_merge(partial[, sink logits], mixed [row, head * dim], begin, end): for the rows from begin to end,
    every head's chunks, weighed by their peaks, over their common total; a row without a context is zero."""
    t, lines = shape.types, Lines()
    peak_at, total_at = lines.index(shape.head_dim), lines.index(shape.head_dim + 1)
    chunks = [lines.index(chunk) for chunk in range(shape.chunks)]
    factors = _factors(lines, shape, chunks, peak_at)
    total = _total(lines, shape, chunks, factors, total_at)
    shares = [
        lines.splat(lines.let(f"arith.divf {factor}, {total} : f32"), shape.columns)
        for factor in factors[: shape.chunks]
    ]
    _mixed(lines, shape, chunks, shares)
    sinks = f", %sinks: {t['sinks']}" if shape.sink_logits else ""
    return f"""func.func private @{name}_merge(%partial: {t["partial"]}{sinks}, %mixed: {t["mixed"]},
    %begin: index, %end: index) {{
%zero = arith.constant 0 : index
%one = arith.constant 1 : index
%heads = arith.constant {shape.num_heads} : index
scf.for %row = %begin to %end step %one {{
scf.for %head = %zero to %heads step %one {{
{lines.text()}
}}
}}
return
}}"""


def _factors(lines: Lines, shape: DecodeAttention, chunks: list[str], peak_at: str) -> list[str]:
    """Emit exp(peak - highest peak) of each chunk, and last of the sink logit, if there is one."""
    t = shape.types
    highest = lines.let("arith.constant -3.0e38 : f32")  # below every score: a peak of nothing is no number
    peaks = [lines.let(f"memref.load %partial[%row, %head, {c}, {peak_at}] : {t['partial']}") for c in chunks]
    if shape.sink_logits:
        peaks.append(lines.let(f"memref.load %sinks[%head] : {t['sinks']}"))
    for peak in peaks:
        highest = lines.let(f"arith.maximumf {highest}, {peak} : f32")
    return [lines.exp_of_scalar(lines.let(f"arith.subf {peak}, {highest} : f32"), shape.lanes) for peak in peaks]


def _total(lines: Lines, shape: DecodeAttention, chunks: list[str], factors: list[str], total_at: str) -> str:
    """Emit the divisor of the head's sums: the chunks' totals times their factors; 1 where that is 0."""
    total = lines.let("arith.constant 0.0 : f32")
    for chunk, factor in zip(chunks, factors, strict=False):
        found = lines.let(f"memref.load %partial[%row, %head, {chunk}, {total_at}] : {shape.types['partial']}")
        total = lines.let(f"arith.addf {total}, {lines.let(f'arith.mulf {found}, {factor} : f32')} : f32")
    if shape.sink_logits:
        total = lines.let(f"arith.addf {total}, {factors[-1]} : f32")
    nothing, one = lines.let("arith.constant 0.0 : f32"), lines.let("arith.constant 1.0 : f32")
    empty = lines.let(f"arith.cmpf oeq, {total}, {nothing} : f32")
    return lines.let(f"arith.select {empty}, {one}, {total} : f32")


def _mixed(lines: Lines, shape: DecodeAttention, chunks: list[str], shares: list[str]) -> None:
    """Emit mixed[row, head] = the chunks' sums, each times its share, rounded."""
    t, lanes = shape.types, shape.columns
    base = lines.let(f"arith.muli %head, {lines.index(shape.head_dim)} : index")
    for at in range(0, shape.head_dim, lanes):
        column = lines.index(at)
        mixed = lines.constant("0.0", lanes)
        for chunk, share in zip(chunks, shares, strict=True):
            sums = lines.load("%partial", f"%row, %head, {chunk}, {column}", t["partial"], lanes, "f32")
            mixed = lines.fma(sums, share, mixed, lanes)
        place = lines.let(f"arith.addi {base}, {column} : index")
        rounded = lines.truncate(mixed, lanes, shape.dtype)
        lines.store(rounded, "%mixed", f"%row, {place}", t["mixed"], lanes, shape.dtype)
