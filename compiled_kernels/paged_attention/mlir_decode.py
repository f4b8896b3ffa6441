"""Build attention of single queries over paged keys and values, with a running softmax page by page.

Work is cut into items: one row, one KV head, one chunk of its pages. A row is one token at the end of its own context,
either a decode or one token of a longer span. All query heads of a KV head read each key and value while it is in the
nearest cache. An item writes its weighted values, not yet divided, with its largest logit (peak) and its sum of weights
(total) to `partial`; `merge` combines the chunks of a head (FlashDecoding, Dao et al. 2023).

    entry, or a decode step:  @item for each item | @merge for each row      (at the bar threads wait for one another)
    @item:  @pages for each run of positions, first the sinks    @pages:  @tile for each page
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from compiled_kernels.builder.functions import alloca, call, call_with, either, function, loop, repeat, return_, when
from compiled_kernels.builder.target import Named, indices
from compiled_kernels.builder.threads import entry, share, wait
from compiled_kernels.builder.values import Value, constant, index
from compiled_kernels.builder.vectors import copy
from compiled_kernels.paged_attention.mlir_pages import Context, PositionRun
from compiled_kernels.paged_attention.mlir_shape import SIZES, DecodeAttention
from compiled_kernels.paged_attention.mlir_softmax import clear, finish, may_see
from compiled_kernels.paged_attention.mlir_tile import PageKind, tile, tile_arguments, work


def seek(shape: DecodeAttention, name: str) -> None:
    """Build the function @{name}_seek(page, end, position, group[, chosen, line]): it returns the first page of a
    table, from `page` on, that is selected and may have a key that a head of the key/value head shows to the query at
    `position`; `end` if there is none."""
    arguments = [*indices("page", "end", "position", "group"), *_chosen(shape)]
    with function(f"{name}_seek", arguments, results=("index",)) as given:

        def hidden(page: Value) -> Value:
            needed = []
            if shape.selected:
                needed.append(given["chosen"][given["chosen_line"] + page].compared("ne", 0))
            if shape.mask:
                here, low = given["position"], page * shape.page_size
                needed.append(may_see(shape, (here, here), (low, low + shape.page_size - 1), given["group"]))
            return functools.reduce(Value.__and__, needed) ^ 1

        def passed(page: Value) -> Value:
            return either(page.below(given["end"]), lambda: hidden(page), lambda: constant(0, "i1"))

        with repeat(given["page"], passed) as turn:
            turn.carry([turn.index + 1])
        return_(*turn.results)


def _chosen(shape: DecodeAttention) -> list[Named]:
    """Return the last arguments if pages are selected: the selected pages, and the begin of the row's entries."""
    return [Named("chosen", shape.types["chosen"]), *indices("chosen_line")] * shape.selected


def _walk_arguments(pages: PageKind) -> list[Named]:
    shape, bounds = pages.shape, indices("line", "begin", "end", "first", "last")
    table = Named("table", shape.flat_type)
    return [*work(shape), *pages.memories, table, *bounds, *_chosen(shape)]


def walk(pages: PageKind, name: str) -> None:
    """Build the function @{name}_{kind}_pages (see `_walk_arguments`): it processes every page from begin to end that
    is selected and may have a key visible to the query at `position`, limited to the positions from first to last. The
    page numbers are in `table`, beginning at `line`."""
    shape = pages.shape
    with function(f"{name}_{pages.kind}_pages", _walk_arguments(pages)) as given:
        end, zero = given["end"], index(0)

        def visit(page: Value, after: Value) -> None:
            base, later = page * shape.page_size, after.below(end).select(after, page)
            begin = given["first"].compared("ugt", base).select(given["first"] - base, zero)
            offsets = {"base": base, "from": begin, "to": (given["last"] - base).minimum(shape.page_size)}
            places = {"page": page, "next": later}
            numbers = {each: given["table"][given["line"] + at].to("index") for each, at in places.items()}
            call_with(f"{name}_{pages.kind}_tile", tile_arguments(pages), given | offsets | numbers)

        def needed(page: Value) -> Value:
            choice = [given[each.name] for each in _chosen(shape)]
            return call(f"{name}_seek", [page, end, given["position"], given["group"], *choice], ["index"])[0]

        if not shape.skips_pages:
            with loop(given["begin"], end) as turn:
                visit(turn.index, turn.index + 1)
        else:
            with repeat(needed(given["begin"]), lambda page: page.below(end)) as turn:
                after = needed(turn.index + 1)
                visit(turn.index, after)
                turn.carry([after])


def _visit(run: PositionRun, name: str, given: Mapping[str, Value]) -> None:
    """Walk this chunk's pages of a run."""
    pages, chunk, first, last = run
    size, chunks, place = pages.shape.page_size, pages.shape.chunks, given["chunk"]
    start = first // size
    stop = first.below(last).select(last.divided_up(size), start)

    def visit(begin: Value, end: Value) -> None:
        own = {each: given[f"{pages.kind}_{each}"] for each in ("table", "line")}
        bounds = {"begin": begin, "end": end, "first": first, "last": last}
        call_with(f"{name}_{pages.kind}_pages", _walk_arguments(pages), {**given, **own, **bounds})

    if chunk == "each":  # counted from the end: the last chunk is never empty
        after, count = index(chunks) - place, stop - start
        each = count.divided_up(chunks)
        visit(*(stop - (each * left).minimum(count) for left in (after, after - 1)))
    else:
        with when(place.equals(0 if chunk == "first" else chunks - 1)):
            visit(start, stop)


def item_arguments(context: Context) -> list[Named]:
    shape, lines = context.shape, [f"{each.kind}_line" for each in context.kinds]
    places = [*indices(*lines, "length"), Named("partial", shape.types["partial"]), *indices("row", "group", "chunk")]
    return [Named("q", shape.types["queries"]), *context.memories, *places, *_chosen(shape)]


def item(context: Context, name: str) -> None:
    """Build the function @{name}_item (see `item_arguments`): it computes one chunk of attention over the row's
    context, for all query heads of one key/value head, and writes the result to `partial`. Each table's page numbers
    begin at its `line`."""
    shape = context.shape
    with function(f"{name}_item", item_arguments(context)) as given:
        partial, row, chunk, length = (given[each] for each in ("partial", "row", "chunk", "length"))
        given |= {each: alloca(shape.types[each]) for each in ("scores", "weights")} | {"position": length - 1}
        head = given["group"] * shape.queries_per_kv
        with loop(head, head + shape.queries_per_kv) as turn:
            clear(shape, partial, (row, turn.index, chunk))
        for run in context.runs(length):
            _visit(run, name, given)


def _results(shape: DecodeAttention) -> list[Named]:
    sinks = [Named("sinks", shape.types["sinks"])] * shape.sink_logits
    return [Named("partial", shape.types["partial"]), *sinks, Named("mixed", shape.types["mixed"])]


def merge(shape: DecodeAttention, name: str) -> None:
    """Build the function @{name}_merge(partial[, sink logits], mixed [row, head * dim], begin, end): for the rows from
    begin to end it combines every head's chunks, each weighted by its share of the sum of weights, and rounds. A row
    without a context is zero."""
    arguments = [*_results(shape), *indices("begin", "end")]
    with (
        function(f"{name}_merge", arguments) as given,
        loop(given["begin"], given["end"]) as row,
        loop(0, shape.num_heads) as head,
    ):
        parts = [(row.index, head.index, chunk) for chunk in range(shape.chunks)]
        sink = given["sinks"][head.index] if shape.sink_logits else None
        finish(shape, given["partial"], parts, sink, given["mixed"], (row.index, head.index * shape.head_dim))


def attention(context: Context, name: str) -> None:
    """Build the functions @{name}_item (see `item_arguments`) and @{name}_merge(partial[, sink logits], mixed, begin,
    end), and the functions that they call."""
    if context.shape.skips_pages:
        seek(context.shape, name)
    for pages in context.kinds:
        tile(pages, name)
        walk(pages, name)
    item(context, name)
    merge(context.shape, name)


def attend_rows(context: Context, operator: str) -> None:
    """Build the function @{operator}(q [row, head, dim], pages and their tables (see `Context.memories`), length of
    each row, (rows, 0, pages of a line of each table)[, selected pages [row, kv_head, page]], partial[, sink logits],
    mixed [row, head * dim]), which all threads run at once, and the functions that it calls."""
    shape, kinds = context.shape, context.kinds
    t, each_group, groups = shape.types, shape.queries_per_kv, shape.num_kv_heads
    places = [Named("lengths", t["lengths"]), Named("sizes", SIZES)]
    arguments = [Named("all", t["q"]), *context.memories, *places, *_chosen(shape)[:1], *_results(shape)]
    attention(context, "attend")
    with entry(operator, arguments) as given:
        queries = alloca(t["queries"])
        rows, *held = (given["sizes"][at].to("index") for at in (0, 2, 3)[: 1 + len(kinds)])
        with loop(given["thread"], rows * (groups * shape.chunks), given["threads"]) as turn:
            pair = turn.index // shape.chunks
            group, row = pair % groups, pair // groups
            with loop(0, each_group) as head:
                taken = row, group * each_group + head.index, 0
                copy(given["all"], taken, queries, (head.index, 0), shape.head_dim, shape.columns)
            length = given["lengths"][row].to("index")
            here = {"q": queries, "length": length, "chunk": turn.index % shape.chunks, "group": group, "row": row}
            here |= {f"{kind.kind}_line": row * each for kind, each in zip(kinds, held, strict=True)}
            call_with("attend_item", item_arguments(context), given | here | {"chosen_line": pair * held[0]})
        wait()
        call("attend_merge", [*(given[each.name] for each in _results(shape)), *share(given, rows, 1)])
