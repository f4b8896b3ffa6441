"""One tile of a span's attention as MLIR text: a few queries at a time over one block of keys and values.

scores  ->  weights (running softmax)  ->  sums, rescaled where the peak rises  ->  last, sums over totals
"""

from __future__ import annotations

from typing import NamedTuple

from compiled_kernels.mlir_text import Lines, vector
from compiled_kernels.paged_attention.mlir_rules import KeyRun, Rules
from compiled_kernels.paged_attention.mlir_shape import BLOCK_POSITIONS, QUERIES_TOGETHER, SpanAttention
from compiled_kernels.paged_attention.mlir_softmax import Softmax


class QuerySlot(NamedTuple):
    """A query at work, as MLIR names: its `place` in weights, its `slot` in the tile; token, head, position."""

    place: str
    slot: str
    token: str
    head: str
    position: str


def weigh(lines: Lines, shape: SpanAttention, query: QuerySlot, scores: list[str], rules: Rules) -> None:
    """Emit the weights of a block from its scores, a vector for each run of keys, and update the query's peak, total
    and sums."""
    t, lanes = shape.types, shape.lanes
    softmax = Softmax.begin(lines, shape)
    visible, logits = _logits(lines, shape, softmax, query, scores, rules)
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
    lines: Lines, shape: SpanAttention, softmax: Softmax, query: QuerySlot, scores: list[str], rules: Rules
) -> tuple[list[str], list[str]]:
    """Emit for each run of keys which of them the query sees, and their logits."""
    lanes, positions = shape.lanes, vector(shape.lanes, "index")
    steps = lines.let(f"vector.step : {positions}")
    here = lines.let(f"vector.broadcast {query.position} : index to {positions}")
    visible, logits = [], []
    for number, score in enumerate(scores):
        base = lines.let(f"arith.addi %start, {lines.index(number * lanes)} : index")
        keys = lines.let(f"vector.broadcast {base} : index to {positions}")
        keys = lines.let(f"arith.addi {keys}, {steps} : {positions}")
        run, shown = KeyRun(query.position, keys, query.head), _visible(lines, shape, keys, here)
        if shape.selected:
            shown = lines.let(f"arith.andi {shown}, {_chosen(lines, shape, query, base)} : {vector(lanes, 'i1')}")
        seen, logit = softmax.logits(score, shown, rules, run)
        visible.append(seen)
        logits.append(logit)
    return visible, logits


def _visible(lines: Lines, shape: SpanAttention, keys: str, here: str) -> str:
    """Emit which of the positions `keys` a query at `here` sees: all up to its own, of these the window
    and the sinks."""
    positions, bits = vector(shape.lanes, "index"), vector(shape.lanes, "i1")
    visible = lines.let(f"arith.cmpi ule, {keys}, {here} : {positions}")
    if not shape.sliding_window:
        return visible
    reach = lines.let(f"arith.addi {keys}, {lines.constant(str(shape.sliding_window), shape.lanes, 'index')} : {positions}")
    near = lines.let(f"arith.cmpi ugt, {reach}, {here} : {positions}")
    if shape.num_sink_tokens:
        sinks = lines.constant(str(shape.num_sink_tokens), shape.lanes, "index")
        sink = lines.let(f"arith.cmpi ult, {keys}, {sinks} : {positions}")
        near = lines.let(f"arith.ori {near}, {sink} : {bits}")
    return lines.let(f"arith.andi {visible}, {near} : {bits}")


def _chosen(lines: Lines, shape: SpanAttention, query: QuerySlot, base: str) -> str:
    """Emit which of the positions from `base` on lie in pages that the query reads."""
    bits, size = vector(shape.lanes, "i1"), lines.index(shape.page_size)
    row = lines.let(f"arith.muli {query.token}, {lines.index(shape.num_kv_heads)} : index")
    row = lines.let(f"arith.addi {row}, %group : index")
    first = lines.let(f"arith.muli {row}, %held : index")
    last_page = lines.let(f"arith.subi %held, {lines.index(1)} : index")
    none = lines.let("arith.constant 0 : i8")

    def read(position: str) -> str:
        page = lines.let(f"arith.divui {position}, {size} : index")
        page = lines.let(f"arith.minui {page}, {last_page} : index")  # positions beyond the context have no page
        place = lines.let(f"arith.addi {first}, {page} : index")
        given = lines.let(f"memref.load %chosen[{place}] : {shape.types['chosen']}")
        return lines.let(f"arith.cmpi ne, {given}, {none} : i8")

    if shape.page_size % shape.lanes == 0:  # they lie in one page
        return lines.let(f"vector.broadcast {read(base)} : i1 to {bits}")
    found = lines.let(f"arith.constant dense<false> : {bits}")
    for at in range(shape.lanes):
        each = read(lines.let(f"arith.addi {base}, {lines.index(at)} : index"))
        found = lines.let(f"vector.insert {each}, {found}[{at}] : i1 into {bits}")
    return found


def _rescale(lines: Lines, shape: SpanAttention, query: QuerySlot, factor: str) -> None:
    """Emit sums = sums * factor, for this query."""
    kind, lanes = shape.types["sums"], shape.columns
    for at in range(0, shape.head_dim, lanes):
        place = f"{query.slot}, {lines.index(at)}"
        sums = lines.load("%sums", place, kind, lanes, "f32")
        sums = lines.let(f"arith.mulf {sums}, {lines.splat(factor, lanes)} : {vector(lanes)}")
        lines.store(sums, "%sums", place, kind, lanes)


def rows(shape: SpanAttention) -> str:
    """Emit @rows(q [token, head, dim], keys, values, at, start, group, token, slot, queries, before, sums, peaks,
    totals, weights[, chosen, held]): the queries of ROWS slots, from `slot` on, of the tile that begins with `token` and has
    `queries`, over the block `at`, whose first position is `start`. `before` is how many positions the span itself
    comes after."""
    t, lines, rules = shape.types, Lines(), Rules(shape, "rows")
    queries = _queries(lines, shape)
    scores = _scores(lines, shape, queries)
    for query, found in zip(queries, scores, strict=True):
        weigh(lines, shape, query, found, rules)
    _mix(lines, shape, queries)
    chosen = f", %chosen: {t['chosen']}, %held: index" if shape.selected else ""
    return f"""{rules.text}
func.func private @rows(%q: {t["q"]}, %keys: {t["keys"]}, %values: {t["values"]}, %at: index, %start: index,
    %group: index, %token: index, %slot: index, %queries: index, %before: index, %sums: {t["sums"]}, %peaks: {t["peaks"]},
    %totals: {t["peaks"]}, %weights: {t["weights"]}{chosen}) {{
%zero = arith.constant 0 : index
%one = arith.constant 1 : index
{lines.text()}
return
}}"""


def _queries(lines: Lines, shape: SpanAttention) -> list[QuerySlot]:
    """Emit the queries of ROWS slots. Slots beyond the tile's last query repeat that query."""
    places = [lines.index(i) for i in range(QUERIES_TOGETHER)]
    slots = [lines.let(f"arith.addi %slot, {place} : index") for place in places]
    last = lines.let("arith.subi %queries, %one : index")
    share, first_head = (
        lines.index(shape.queries_per_kv),
        lines.let(f"arith.muli %group, {lines.index(shape.queries_per_kv)} : index"),
    )
    queries = []
    for place, slot in zip(places, slots, strict=True):
        row = lines.let(f"arith.minui {slot}, {last} : index")
        token = lines.let(f"arith.addi %token, {lines.let(f'arith.divui {row}, {share} : index')} : index")
        head = lines.let(f"arith.addi {first_head}, {lines.let(f'arith.remui {row}, {share} : index')} : index")
        position = lines.let(f"arith.addi %before, {token} : index")
        queries.append(QuerySlot(place, slot, token, head, position))
    return queries


def _scores(lines: Lines, shape: SpanAttention, queries: list[QuerySlot]) -> list[list[str]]:
    """Emit the scores: for each query a vector for each run of keys in the block; as many runs at once as there are
    registers for."""
    starts = [lines.index(at) for at in range(0, BLOCK_POSITIONS, shape.lanes)]
    most = max(1, shape.target.accumulators // QUERIES_TOGETHER)
    found: list[list[str]] = [[] for _ in queries]
    for first in range(0, len(starts), most):
        for row, scores in zip(found, _score_runs(lines, shape, queries, starts[first : first + most]), strict=True):
            row += scores
    return found


def _score_runs(lines: Lines, shape: SpanAttention, queries: list[QuerySlot], runs: list[str]) -> list[list[str]]:
    t, lanes, label = shape.types, shape.lanes, lines.serial
    zero = lines.constant("0.0", lanes)
    names = [f"%s{label}_{i}" for i in range(QUERIES_TOGETHER * len(runs))]
    end = lines.index(shape.head_dim // shape.values_per_element)
    found = lines.begin_loop(f"%found{label}", f"%d = %zero to {end} step %one", names, [zero] * len(names), lanes)
    keys = _elements(lines, shape, [f"%keys[%at, %d, {run}] : {t['keys']}" for run in runs], lanes)
    column = lines.let(f"arith.muli %d, {lines.index(shape.values_per_element)} : index")
    moved, carried = [], iter(names)
    for query in queries:
        factor = _factor(lines, shape, f"%q[{query.token}, {query.head}, {column}] : {t['q']}", shape.dtype, lanes)
        moved += [_multiply(lines, shape, next(carried), key, factor, lanes) for key in keys]
    lines.end_loop(moved, lanes)
    return [found[i : i + len(runs)] for i in range(0, len(found), len(runs))]


def _mix(lines: Lines, shape: SpanAttention, queries: list[QuerySlot]) -> None:
    """Emit sums += weights · values, in runs of as many columns as there are registers for."""
    columns = range(0, shape.head_dim, shape.columns)
    most = max(1, shape.target.accumulators // QUERIES_TOGETHER)
    for first in range(0, len(columns), most):
        _mix_run(lines, shape, queries, [lines.index(at) for at in columns[first : first + most]], str(first))


def _mix_run(lines: Lines, shape: SpanAttention, queries: list[QuerySlot], run: list[str], label: str) -> None:
    t, lanes = shape.types, shape.columns
    places = [f"{query.slot}, {column}" for query in queries for column in run]
    sums = [lines.load("%sums", place, t["sums"], lanes, "f32") for place in places]
    names = [f"%m{label}_{i}" for i in range(len(sums))]
    end = lines.index(BLOCK_POSITIONS // shape.values_per_element)
    found = lines.begin_loop(f"%mixed{label}", f"%d = %zero to {end} step %one", names, sums, lanes)
    values = _elements(lines, shape, [f"%values[%at, %d, {column}] : {t['values']}" for column in run], lanes)
    key = lines.let(f"arith.muli %d, {lines.index(shape.values_per_element)} : index")
    moved, carried = [], iter(names)
    for query in queries:
        factor = _factor(lines, shape, f"%weights[{query.place}, {key}] : {t['weights']}", "f32", lanes)
        moved += [_multiply(lines, shape, next(carried), value, factor, lanes) for value in values]
    lines.end_loop(moved, lanes)
    for place, result in zip(places, found, strict=True):
        lines.store(result, "%sums", place, t["sums"], lanes)


def _elements(lines: Lines, shape: SpanAttention, places: list[str], lanes: int) -> list[str]:
    """Emit vectors of the new layout as they are multiplied; a place is a memory, indices and type."""
    found = [lines.let(f"vector.load {place}, {vector(lanes, shape.element_type)}") for place in places]
    if not shape.uses_bf16_pairs:
        return found
    return [
        lines.let(f"vector.bitcast {each} : {vector(lanes, 'i32')} to {vector(2 * lanes, 'bf16')}") for each in found
    ]


def _factor(lines: Lines, shape: SpanAttention, place: str, element: str, lanes: int) -> str:
    """Emit the number at a place, in every element of a vector: a pair of bfloat16, or one number of type `element`."""
    if shape.uses_bf16_pairs:
        return lines.splat_pair(lines.let(f"vector.load {place}, {vector(2, 'bf16')}"))
    loaded = lines.let(f"memref.load {place}")
    return lines.splat(loaded if element == "f32" else lines.let(f"arith.extf {loaded} : {element} to f32"), lanes)


def _multiply(lines: Lines, shape: SpanAttention, sums: str, elements: str, factor: str, lanes: int) -> str:
    return (
        lines.dot_pairs(sums, elements, factor) if shape.uses_bf16_pairs else lines.fma(elements, factor, sums, lanes)
    )


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
    """Emit the factor of a slot's sums: 1 / total, where a sink logit joins the total; 1 for a query that sees nothing,
    whose sums are 0; exp(peak) where weights are not normalized."""
    t = shape.types
    if not shape.normalized:
        return lines.exp(lines.let(f"memref.load %peaks[%slot] : {t['peaks']}"), 0)
    total = lines.let(f"memref.load %totals[%slot] : {t['peaks']}")
    if not shape.sink_logits:
        nothing, one = (lines.let(f"arith.constant {each} : f32") for each in ("0.0", "1.0"))
        blind = lines.let(f"arith.cmpf oeq, {total}, {nothing} : f32")
        return lines.let(f"arith.divf {one}, {lines.let(f'arith.select {blind}, {one}, {total} : f32')} : f32")
    sink = lines.let(f"memref.load %sinks[%head] : {t['sinks']}")
    peak = lines.let(f"memref.load %peaks[%slot] : {t['peaks']}")
    highest = lines.let(f"arith.maximumf {sink}, {peak} : f32")
    factor, sunk = (lines.exp(lines.let(f"arith.subf {each}, {highest} : f32"), 0) for each in (peak, sink))
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
