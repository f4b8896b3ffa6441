"""Attention of a span, last: a tile's sums over their totals."""

from __future__ import annotations

from compiled_kernels.mlir_text import Lines, vector
from compiled_kernels.paged_attention.mlir_span_shape import SpanAttention


def finish(shape: SpanAttention) -> str:
    """Emit @finish([sink logits, ]sums, peaks, totals, out [token, head, dim], group, token, queries): what the tile
    of one group that begins with `token` and has `queries` has found, put where it belongs."""
    t, lines = shape.types, Lines()
    share = _share(lines, shape)
    for at in range(0, shape.head_dim, shape.columns):
        _put(lines, shape, lines.index(at), share)
    sinks = f"%sinks: {t['sinks']}, " if shape.sink_logits else ""
    return f"""func.func private @finish({sinks}%sums: {t["sums"]}, %peaks: {t["peaks"]}, %totals: {t["peaks"]}, %out: {t["q"]},
    %group: index, %token: index, %queries: index) {{
%zero = arith.constant 0 : index
%one = arith.constant 1 : index
%share = arith.constant {shape.queries_per_kv} : index
%first = arith.muli %group, %share : index
scf.for %slot = %zero to %queries step %one {{
  %behind = arith.divui %slot, %share : index
  %row = arith.addi %token, %behind : index
  %which = arith.remui %slot, %share : index
  %head = arith.addi %first, %which : index
  {lines.text()}
}}
return
}}"""


def _share(lines: Lines, shape: SpanAttention) -> str:
    """Emit the factor of a slot's sums: 1 / total, where a sink logit joins the total."""
    t = shape.types
    total = lines.let(f"memref.load %totals[%slot] : {t['peaks']}")
    if not shape.sink_logits:
        return lines.let(f"arith.divf {lines.let('arith.constant 1.0 : f32')}, {total} : f32")
    sink = lines.let(f"memref.load %sinks[%head] : {t['sinks']}")
    peak = lines.let(f"memref.load %peaks[%slot] : {t['peaks']}")
    highest = lines.let(f"arith.maximumf {sink}, {peak} : f32")
    factor, sunk = (
        lines.exp_of_scalar(lines.let(f"arith.subf {each}, {highest} : f32"), shape.lanes) for each in (peak, sink)
    )
    total = lines.let(f"arith.mulf {total}, {factor} : f32")
    total = lines.let(f"arith.addf {total}, {sunk} : f32")
    return lines.let(f"arith.divf {factor}, {total} : f32")


def _put(lines: Lines, shape: SpanAttention, column: str, share: str) -> None:
    """Emit out[row, head] = sums * share, rounded: the columns of one vector."""
    t, lanes = shape.types, shape.columns
    sums = lines.load("%sums", f"%slot, {column}", t["sums"], lanes, "f32")
    sums = lines.let(f"arith.mulf {sums}, {lines.splat(share, lanes)} : {vector(lanes)}")
    rounded = lines.truncate(sums, lanes, shape.dtype)
    lines.store(rounded, "%out", f"%row, %head, {column}", t["q"], lanes, shape.dtype)
