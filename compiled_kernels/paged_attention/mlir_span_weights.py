"""Attention of a span: one query's scores with a block of keys become weights."""

from __future__ import annotations

from typing import NamedTuple

from compiled_kernels.mlir_text import Lines, vector
from compiled_kernels.paged_attention.mlir_softmax import Softmax
from compiled_kernels.paged_attention.mlir_span_shape import SpanAttention


class QuerySlot(NamedTuple):
    """A query at work, as MLIR names: its `place` in weights, its `slot` in the tile; token, head, position."""

    place: str
    slot: str
    token: str
    head: str
    position: str


def weigh(lines: Lines, shape: SpanAttention, query: QuerySlot, scores: list[str]) -> None:
    """Emit the weights of a block from its scores, a vector for each run of keys, and update the query's peak, total
    and sums."""
    t, lanes = shape.types, shape.lanes
    softmax = Softmax.begin(lines, shape)
    visible, logits = _logits(lines, shape, softmax, query, scores)
    before, peaks = softmax.raise_peak(f"%peaks[{query.slot}] : {t['peaks']}", softmax.highest(logits))
    total, weights = softmax.zero, []
    for each, seen in zip(logits, visible, strict=True):
        weights.append(softmax.weight(each, seen, peaks))
        total = lines.let(f"arith.addf {total}, {weights[-1]} : {vector(lanes)}")
    element = "bf16" if shape.uses_bf16_pairs else "f32"
    for run, weight in enumerate(weights):
        rounded = lines.truncate(weight, lanes, element)
        lines.store(rounded, "%weights", f"{query.place}, {lines.index(run * lanes)}", t["weights"], lanes, element)
    factor = softmax.move_total(f"%totals[{query.slot}] : {t['peaks']}", before, peaks, total)
    _rescale(lines, shape, query, factor)


def _logits(
    lines: Lines, shape: SpanAttention, softmax: Softmax, query: QuerySlot, scores: list[str]
) -> tuple[list[str], list[str]]:
    """Emit for each run of keys which of them the query sees, and their logits."""
    lanes, positions = shape.lanes, vector(shape.lanes, "index")
    steps = lines.let(f"vector.step : {positions}")
    here = lines.let(f"vector.broadcast {query.position} : index to {positions}")
    visible, logits = [], []
    for run, score in enumerate(scores):
        base = lines.let(f"arith.addi %start, {lines.index(run * lanes)} : index")
        keys = lines.let(f"vector.broadcast {base} : index to {positions}")
        visible.append(_visible(lines, shape, lines.let(f"arith.addi {keys}, {steps} : {positions}"), here))
        logits.append(softmax.logits(score, visible[-1]))
    return visible, logits


def _visible(lines: Lines, shape: SpanAttention, keys: str, here: str) -> str:
    """Emit which of the positions `keys` a query at `here` sees: all up to its own, of these the window
    and the sinks."""
    positions, bits = vector(shape.lanes, "index"), vector(shape.lanes, "i1")
    visible = lines.let(f"arith.cmpi ule, {keys}, {here} : {positions}")
    if not shape.window:
        return visible
    reach = lines.let(f"arith.addi {keys}, {lines.constant(str(shape.window), shape.lanes, 'index')} : {positions}")
    near = lines.let(f"arith.cmpi ugt, {reach}, {here} : {positions}")
    if shape.sinks:
        sinks = lines.constant(str(shape.sinks), shape.lanes, "index")
        sink = lines.let(f"arith.cmpi ult, {keys}, {sinks} : {positions}")
        near = lines.let(f"arith.ori {near}, {sink} : {bits}")
    return lines.let(f"arith.andi {visible}, {near} : {bits}")


def _rescale(lines: Lines, shape: SpanAttention, query: QuerySlot, factor: str) -> None:
    """Emit sums = sums * factor, for this query."""
    kind, lanes = shape.types["sums"], shape.columns
    for at in range(0, shape.head_dim, lanes):
        place = f"{query.slot}, {lines.index(at)}"
        sums = lines.load("%sums", place, kind, lanes, "f32")
        sums = lines.let(f"arith.mulf {sums}, {lines.splat(factor, lanes)} : {vector(lanes)}")
        lines.store(sums, "%sums", place, kind, lanes)
