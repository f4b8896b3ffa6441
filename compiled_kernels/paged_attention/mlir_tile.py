"""One tile of decode attention as MLIR text: the visible offsets of one page, for a few query heads at a time.

scores of the page's keys  ->  weights (running softmax)  ->  values, weighted, added to the heads' sums
"""

from __future__ import annotations

from typing import NamedTuple

from compiled_kernels.mlir_text import Lines, vector
from compiled_kernels.paged_attention.mlir_rules import KeyRun, Rules
from compiled_kernels.paged_attention.mlir_shape import HEADS_TOGETHER, DecodeAttention
from compiled_kernels.paged_attention.mlir_softmax import Softmax


class QueryHead(NamedTuple):
    """A query head at work: its `number` in the group, its `slot` in scores and weights, its `owner`, the number
    among all heads, in `partial`; the latter two as MLIR names."""

    number: int
    slot: str
    owner: str


def score_keys(lines: Lines, shape: DecodeAttention, heads: list[QueryHead]) -> None:
    """Emit scores[slot, offset] = q · k, for offsets from %from to %to."""
    if shape.uses_bf16_pairs and shape.page_size % 16 == 0:
        _sixteen_keys_at_once(lines, shape, heads)
    else:
        _score_keys(lines, shape, heads)


def _score_keys(lines: Lines, shape: DecodeAttention, heads: list[QueryHead]) -> None:
    read, lanes = (
        (32, 16) if shape.uses_bf16_pairs else (shape.columns, shape.columns)
    )  # numbers a vector: read, and of sums
    columns = [lines.index(at) for at in range(0, shape.head_dim, read)]
    queries = _queries(lines, shape, heads, columns, read)
    zero = lines.constant("0.0", lanes)
    lines.emit("scf.for %o = %from to %to step %one {")
    fetch(lines, shape, "%k", "%o")
    key = [_vector(lines, shape, "%k", f"%page, %group, %o, {column}", shape.pages, read) for column in columns]
    for head, query in zip(heads, queries, strict=True):
        total = zero
        for a, b in zip(query, key, strict=True):
            total = lines.dot_pairs(total, a, b) if shape.uses_bf16_pairs else lines.fma(a, b, total, read)
        lines.emit(f"memref.store {lines.hsum(total, lanes)}, %scores[{head.slot}, %o] : {shape.types['scores']}")
    lines.emit("}")


def _sixteen_keys_at_once(lines: Lines, shape: DecodeAttention, heads: list[QueryHead]) -> None:
    """Score 16 keys together, so that their sums across lanes are taken together. A run of 16 may reach beyond the
    offsets in use; such scores are ignored."""
    columns = [lines.index(at) for at in range(0, shape.head_dim, 32)]
    queries = _queries(lines, shape, heads, columns, 32)
    zero = lines.constant("0.0", 16)
    run = lines.index(16)
    start = lines.let(f"arith.muli {lines.let(f'arith.divui %from, {run} : index')}, {run} : index")
    lines.emit(f"scf.for %o = {start} to %to step {run} {{")
    keys = [lines.let(f"arith.addi %o, {lines.index(i)} : index") for i in range(16)]
    for key in keys:
        fetch(lines, shape, "%k", key)
    for head, query in zip(heads, queries, strict=True):
        sums = []
        for key in keys:
            total = zero
            for column, part in zip(columns, query, strict=True):
                loaded = _vector(lines, shape, "%k", f"%page, %group, {key}, {column}", shape.pages, 32)
                total = lines.dot_pairs(total, part, loaded)
            sums.append(total)
        lines.store(lines.hsums(sums, 16), "%scores", f"{head.slot}, %o", shape.types["scores"], 16)
    lines.emit("}")


def fetch(lines: Lines, shape: DecodeAttention, memory: str, offset: str) -> None:
    """Ask for what the next page holds at `offset`, a cache line at a time: pages lie anywhere, and between two of them
    the processor would have nothing under way."""
    line = 64 // (4 if shape.dtype == "f32" else 2)
    for at in range(0, shape.head_dim, line):
        place = f"%next, %group, {offset}, {lines.index(at)}"
        lines.emit(f"memref.prefetch {memory}[{place}], read, locality<3>, data : {shape.pages}")


def _queries(
    lines: Lines, shape: DecodeAttention, heads: list[QueryHead], columns: list[str], read: int
) -> list[list[str]]:
    """Emit each head's query, vector by vector."""
    kind = shape.types["queries"]
    return [
        [_vector(lines, shape, "%q", f"{lines.index(head.number)}, {column}", kind, read) for column in columns]
        for head in heads
    ]


def _vector(lines: Lines, shape: DecodeAttention, memory: str, at: str, kind: str, read: int) -> str:
    """Emit `read` numbers as they are multiplied: bfloat16 pairs, or float32."""
    loaded = lines.load(memory, at, kind, read, shape.dtype)
    return loaded if shape.uses_bf16_pairs else lines.extend(loaded, read, shape.dtype)


def mix_values(lines: Lines, shape: DecodeAttention, heads: list[QueryHead], factors: list[str]) -> None:
    """Emit partial = partial * factor + weights · values, for offsets from %from to %to.

    As many sums as registers: wide heads are walked in runs of columns.
    """
    columns = [lines.index(at) for at in range(0, shape.head_dim, shape.columns)]
    most = max(1, shape.target.accumulators // len(heads))
    for first in range(0, len(columns), most):
        run = columns[first : first + most]
        sums, begin = _earlier(lines, shape, heads, factors, run), "%from"
        if shape.uses_bf16_pairs and len(run) % 2 == 0:
            sums, begin = _two_keys_at_once(lines, shape, heads, run, sums)
        sums = iter(_add_keys(lines, shape, heads, run, sums, begin))
        for head in heads:
            for column in run:
                lines.store(next(sums), "%partial", _place(head, column), shape.types["partial"], shape.columns)


def _place(head: QueryHead, column: str) -> str:
    return f"%row, {head.owner}, %chunk, {column}"


def _earlier(
    lines: Lines, shape: DecodeAttention, heads: list[QueryHead], factors: list[str], run: list[str]
) -> list[str]:
    """Emit sums of earlier offsets times each head's factor, a vector for each head and column."""
    lanes, sums = shape.columns, []
    for head, factor in zip(heads, factors, strict=True):
        factors_ = lines.splat(factor, lanes)
        for column in run:
            before = lines.load("%partial", _place(head, column), shape.types["partial"], lanes, "f32")
            sums.append(lines.let(f"arith.mulf {before}, {factors_} : {vector(lanes)}"))
    return sums


def _add_keys(
    lines: Lines, shape: DecodeAttention, heads: list[QueryHead], run: list[str], sums: list[str], begin: str
) -> list[str]:
    """Emit the sums, moved on by the keys from `begin` to %to."""
    t, lanes, mark = shape.types, shape.columns, lines.serial
    names = [f"%a{mark}_{i}" for i in range(len(sums))]
    found = lines.begin_loop(f"%r{mark}", f"%o = {begin} to %to step %one", names, sums, lanes)
    fetch(lines, shape, "%v", "%o")
    loaded = (lines.load("%v", f"%page, %group, %o, {column}", t["pages"], lanes, shape.dtype) for column in run)
    values = [lines.extend(value, lanes, shape.dtype) for value in loaded]
    moved, carried = [], iter(names)
    for head in heads:
        weight = lines.splat(lines.let(f"memref.load %scores[{head.slot}, %o] : {t['scores']}"), lanes)
        moved += [lines.fma(weight, value, next(carried), lanes) for value in values]
    lines.end_loop(moved, lanes)
    return found


def _two_keys_at_once(
    lines: Lines, shape: DecodeAttention, heads: list[QueryHead], run: list[str], sums: list[str]
) -> tuple[list[str], str]:
    """Emit the sums, moved on by pairs of keys as dot products; and the offset of a last key that has no partner."""
    two = lines.index(2)
    count = lines.let("arith.subi %to, %from : index")
    odd = lines.let(f"arith.remui {count}, {two} : index")
    last = lines.let(f"arith.subi %to, {odd} : index")
    mark = lines.serial
    names = [f"%p{mark}_{i}" for i in range(len(sums))]
    found = lines.begin_loop(f"%b{mark}", f"%o = %from to {last} step {two}", names, sums, 16)
    for offset in ("%o", lines.let("arith.addi %o, %one : index")):
        fetch(lines, shape, "%v", offset)
    values = _woven(lines, shape, run)
    moved, carried = [], iter(names)
    for head in heads:
        weight = lines.splat_pair(lines.load("%weights", f"{head.slot}, %o", shape.types["weights"], 2, "bf16"))
        moved += [lines.dot_pairs(next(carried), value, weight) for value in values]
    lines.end_loop(moved, 16)
    return found, last


def _woven(lines: Lines, shape: DecodeAttention, run: list[str]) -> list[str]:
    """Emit the values of keys %o and %o + 1 as pairs, 16 columns a vector; two such come from one load of each key."""
    partner = lines.let("arith.addi %o, %one : index")
    values = []
    for column in run[::2]:
        first, second = (
            lines.load("%v", f"%page, %group, {offset}, {column}", shape.pages, 32, "bf16")
            for offset in ("%o", partner)
        )
        woven = lines.let(f"vector.interleave {first}, {second} : vector<32xbf16> -> vector<64xbf16>")
        for at in (0, 32):
            part = f"{{offsets = [{at}], sizes = [32], strides = [1]}} : vector<64xbf16> to vector<32xbf16>"
            values.append(lines.let(f"vector.extract_strided_slice {woven} {part}"))
    return values


def tile(shape: DecodeAttention, name: str) -> str:
    """Emit @{name}_tile(q [share, dim], k, v, page, next page, group, from, to, base, position, partial, row, chunk,
    scores, weights): offsets [from, to) of one page, whose first position is `base`, move on what `partial` holds of
    the row's chunk, for all query heads of the group; the query is at `position`."""
    t, lines, rules = shape.types, Lines(), Rules(shape, f"{name}_tile")
    for first in range(0, shape.queries_per_kv, HEADS_TOGETHER):
        _heads(lines, shape, range(first, min(first + HEADS_TOGETHER, shape.queries_per_kv)), rules)
    return f"""{rules.text}
func.func private @{name}_tile(%q: {t["queries"]}, %k: {t["pages"]}, %v: {t["pages"]}, %page: index,
    %next: index, %group: index, %from: index, %to: index, %base: index, %position: index, %partial: {t["partial"]},
    %row: index, %chunk: index, %scores: {t["scores"]}, %weights: {t["weights"]}) {{
%one = arith.constant 1 : index
{lines.text()}
return
}}"""


def query_heads(lines: Lines, shape: DecodeAttention, numbers: range) -> list[QueryHead]:
    """Emit the names of the heads of these numbers in the group."""
    slots = [lines.index(i) for i in range(len(numbers))]
    first = lines.let(f"arith.muli %group, {lines.index(shape.queries_per_kv)} : index")
    owners = [lines.let(f"arith.addi {first}, {lines.index(number)} : index") for number in numbers]
    return [QueryHead(*names) for names in zip(numbers, slots, owners, strict=True)]


def _heads(lines: Lines, shape: DecodeAttention, numbers: range, rules: Rules) -> None:
    """Emit the heads of these numbers in the group: scores, weights, sums."""
    heads = query_heads(lines, shape, numbers)
    score_keys(lines, shape, heads)
    factors = [weigh(lines, shape, head, rules) for head in heads]
    mix_values(lines, shape, heads, factors)


def weigh(lines: Lines, shape: DecodeAttention, head: QueryHead, rules: Rules) -> str:
    """Emit a head's weights from its scores, and update its peak and total; return the factor for earlier sums. The
    page's first position is %base, the query's %position."""
    t, lanes = shape.types, shape.lanes
    softmax = Softmax.begin(lines, shape)
    starts = [lines.index(at) for at in range(0, shape.padded_page_size, lanes)]
    visible, logits = _logits(lines, shape, softmax, head, starts, rules)
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
    lines: Lines, shape: DecodeAttention, softmax: Softmax, head: QueryHead, starts: list[str], rules: Rules
) -> tuple[list[str], list[str]]:
    """Emit for each run of offsets which are visible, in [from, to) and by the rules, and their logits."""
    lanes, kind = shape.lanes, vector(shape.lanes, "index")
    steps = lines.let(f"vector.step : {kind}")
    begin, end, base = (
        lines.let(f"vector.broadcast {limit} : index to {kind}") for limit in ("%from", "%to", "%base")
    )
    visible, logits = [], []
    for start in starts:
        offset = lines.let(f"vector.broadcast {start} : index to {kind}")
        offset = lines.let(f"arith.addi {offset}, {steps} : {kind}")
        begun = lines.let(f"arith.cmpi uge, {offset}, {begin} : {kind}")
        not_ended = lines.let(f"arith.cmpi ult, {offset}, {end} : {kind}")
        inside = lines.let(f"arith.andi {begun}, {not_ended} : {vector(lanes, 'i1')}")
        scores = lines.load("%scores", f"{head.slot}, {start}", shape.types["scores"], lanes, "f32")
        keys = lines.let(f"arith.addi {base}, {offset} : {kind}")
        seen, logit = softmax.logits(scores, inside, rules, KeyRun("%position", keys, head.owner))
        visible.append(seen)
        logits.append(logit)
    return visible, logits
