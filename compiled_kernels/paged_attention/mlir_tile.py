"""Decode attention, innermost: the offsets of one page that a query sees, for a few query heads at a time."""

from __future__ import annotations

from compiled_kernels.mlir_text import Lines, vector
from compiled_kernels.paged_attention.mlir_mix import mix_values
from compiled_kernels.paged_attention.mlir_scores import QueryHead, score_keys
from compiled_kernels.paged_attention.mlir_shape import HEADS_TOGETHER, DecodeAttention
from compiled_kernels.paged_attention.mlir_softmax import Softmax


def tile(shape: DecodeAttention, name: str) -> str:
    """Emit @{name}_tile(q [share, dim], k, v, page, next page, group, from, to, partial, row, chunk, scores, weights):
    offsets [from, to) of one page move on what `partial` holds of the row's chunk, for all query heads of the group."""
    t, lines = shape.types, Lines()
    for first in range(0, shape.queries_per_kv, HEADS_TOGETHER):
        _heads(lines, shape, range(first, min(first + HEADS_TOGETHER, shape.queries_per_kv)))
    return f"""func.func private @{name}_tile(%q: {t["queries"]}, %k: {t["pages"]}, %v: {t["pages"]}, %page: index,
    %next: index, %group: index, %from: index, %to: index, %partial: {t["partial"]}, %row: index, %chunk: index,
    %scores: {t["scores"]}, %weights: {t["weights"]}) {{
%one = arith.constant 1 : index
{lines.text()}
return
}}"""


def _heads(lines: Lines, shape: DecodeAttention, numbers: range) -> None:
    """Emit the heads of these numbers in the group: scores, weights, sums."""
    slots = [lines.index(i) for i in range(len(numbers))]
    first = lines.let(f"arith.muli %group, {lines.index(shape.queries_per_kv)} : index")
    owners = [lines.let(f"arith.addi {first}, {lines.index(number)} : index") for number in numbers]
    heads = [QueryHead(*names) for names in zip(numbers, slots, owners, strict=True)]
    score_keys(lines, shape, heads)
    factors = [weigh(lines, shape, head) for head in heads]
    mix_values(lines, shape, heads, factors)


def weigh(lines: Lines, shape: DecodeAttention, head: QueryHead) -> str:
    """Emit a head's weights from its scores, and update its peak and total; return the factor for earlier sums."""
    t, lanes = shape.types, shape.lanes
    softmax = Softmax.begin(lines, shape)
    starts = [lines.index(at) for at in range(0, shape.padded_page_size, lanes)]
    visible, logits = _logits(lines, shape, softmax, head, starts)
    highest = softmax.highest(logits)
    peak_at, total_at = lines.index(shape.head_dim), lines.index(shape.head_dim + 1)
    before, peaks = softmax.raise_peak(f"%partial[%row, {head.owner}, %chunk, {peak_at}] : {t['partial']}", highest)
    sums = softmax.zero
    for start, seen, each in zip(starts, visible, logits, strict=True):
        weight = softmax.weight(each, seen, peaks)
        place = f"{head.slot}, {start}"
        lines.store(weight, "%scores", place, t["scores"], lanes)
        if shape.uses_bf16_pairs:
            lines.store(lines.truncate(weight, lanes, "bf16"), "%weights", place, t["weights"], lanes, "bf16")
        sums = lines.let(f"arith.addf {sums}, {weight} : {vector(lanes)}")
    return softmax.move_total(f"%partial[%row, {head.owner}, %chunk, {total_at}] : {t['partial']}", before, peaks, sums)


def _logits(
    lines: Lines, shape: DecodeAttention, softmax: Softmax, head: QueryHead, starts: list[str]
) -> tuple[list[str], list[str]]:
    """Emit for each run of offsets which are in [from, to), and their logits."""
    lanes, kind = shape.lanes, vector(shape.lanes, "index")
    steps = lines.let(f"vector.step : {kind}")
    begin, end = (lines.let(f"vector.broadcast {limit} : index to {kind}") for limit in ("%from", "%to"))
    visible, logits = [], []
    for start in starts:
        offset = lines.let(f"vector.broadcast {start} : index to {kind}")
        offset = lines.let(f"arith.addi {offset}, {steps} : {kind}")
        begun = lines.let(f"arith.cmpi uge, {offset}, {begin} : {kind}")
        not_ended = lines.let(f"arith.cmpi ult, {offset}, {end} : {kind}")
        visible.append(lines.let(f"arith.andi {begun}, {not_ended} : {vector(lanes, 'i1')}"))
        scores = lines.load("%scores", f"{head.slot}, {start}", shape.types["scores"], lanes, "f32")
        logits.append(softmax.logits(scores, visible[-1]))
    return visible, logits
