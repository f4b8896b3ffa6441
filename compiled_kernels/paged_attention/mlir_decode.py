"""Attention of single queries over paged keys and values, with a running softmax page by page.

Work is cut into items: one sequence, one KV head, one chunk of its pages. All query heads of a KV head read each key
and value while it lies in the nearest cache. An item writes its unscaled sums, their peak and their total to `partial`;
`merge` combines the chunks of a head (FlashDecoding, Dao et al. 2023).

    entry, or a decode step:  @item for each item | @merge for each row      (at the bar threads wait for one another)
    @item:  @pages, first for the sinks, then for the window    @pages:  @tile for each page
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping

from compiled_kernels.builder.functions import alloca, call, call_with, either, function, loop, repeat, return_
from compiled_kernels.builder.target import Named, indices
from compiled_kernels.builder.threads import entry, share, wait
from compiled_kernels.builder.values import Value, constant, index
from compiled_kernels.paged_attention.mlir_shape import DecodeAttention
from compiled_kernels.paged_attention.mlir_softmax import first_seen, may_see, mixed, shares
from compiled_kernels.paged_attention.mlir_tile import DecodePages, ReadDensePages, tile, tile_arguments, work


def seek(shape: DecodeAttention, name: str) -> None:
    """Make @{name}_seek(page, end, position, group[, chosen]): the first page of a table from `page` on that is chosen
    and in which the query at `position` may see a key with a head of the group, or `end` where there is none."""
    arguments = [*indices("page", "end", "position", "group"), *_chosen(shape)]
    with function(f"{name}_seek", arguments, results=("index",)) as given:

        def hidden(page: Value) -> Value:
            needed = []
            if shape.selected:
                needed.append(given["chosen"][page].compared("ne", 0))
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
    """Return the last argument where pages are chosen: which of them are read."""
    return [Named("chosen", shape.types["chosen"])] * shape.selected


def _walk_arguments(pages: DecodePages, table: str) -> list[Named]:
    shape, bounds = pages.shape, indices("line", "begin", "end", "first", "last")
    return [*work(shape, pages.queries_type), *pages.memories, Named("table", table), *bounds, *_chosen(shape)]


def walk(pages: DecodePages, table: str, name: str) -> None:
    """Make @{name}_{kind}_pages (see `_walk_arguments`): the tile of every page from begin to end that is chosen, and
    in which the query at `position` may see a key, cut to the positions from first to last. Page numbers stand in a
    line of the `table`, or where it is flat from `line` on."""
    shape = pages.shape
    with function(f"{name}_{pages.kind}_pages", _walk_arguments(pages, table)) as given:
        end, flat, zero = given["end"], len(given["table"].type.shape) == 1, index(0)

        def number(page: Value) -> Value:
            place = given["line"] + page if flat else (given["line"], page)
            return given["table"][place].to("index")

        def visit(page: Value, after: Value) -> None:
            base, later = page * shape.page_size, after.below(end).select(after, page)
            begin = given["first"].compared("ugt", base).select(given["first"] - base, zero)
            offsets = {"base": base, "from": begin, "to": (given["last"] - base).minimum(shape.page_size)}
            numbers = {"page": number(page), "next": number(later)}
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


def run(
    pages: DecodePages, name: str, given: Mapping[str, Value], pages_of: tuple[Value, Value], first: Value, last: Value
) -> None:
    """Walk pages from begin to end, cut to the positions from first to last."""
    begin, end = pages_of
    bounds = {"begin": begin, "end": end, "first": first, "last": last}
    call_with(f"{name}_{pages.kind}_pages", _walk_arguments(pages, ""), {**given, **bounds})


def begin_item(shape: DecodeAttention, given: dict[str, Value], length: Value) -> dict[str, Value]:
    """Return an item's values by name, with room for its scores; its state is that before any key: sums 0, peak minus
    infinity, total 0."""
    partial, row, chunk = given["partial"], given["row"], given["chunk"]
    buffers = {name: alloca(shape.types[name]) for name in ("scores", "weights")}
    first, zero = given["group"] * shape.queries_per_kv, constant(0.0, "f32")
    with loop(first, first + shape.queries_per_kv) as head:
        with loop(0, shape.head_dim + 2) as at:
            partial[row, head.index, chunk, at.index] = zero
        partial[row, head.index, chunk, shape.head_dim] = constant(-math.inf, "f32")
    return given | buffers | {"position": length - 1}


def item(shape: DecodeAttention, name: str) -> None:
    """Make @{name}_item(q [share, dim], k, v, table, lengths, partial, row, group, chunk[, chosen]): the chunk's part
    of the row's context, for all query heads of the group, into `partial`."""
    pages = ReadDensePages(shape)
    with function(f"{name}_item", _item_arguments(shape)) as given:
        length = given["lengths"][given["row"]].to("index")
        values = begin_item(shape, given | {"line": given["row"]}, length)
        first, zero = first_seen(shape, length), index(0)
        if shape.num_sink_tokens:  # the first chunk sees to them
            end = given["chunk"].equals(0).select(first.minimum(shape.num_sink_tokens), zero)
            run(pages, name, values, (zero, end.divided_up(shape.page_size)), zero, end)
        # counted from the end: the last chunk is never empty
        stop, after = length.divided_up(shape.page_size), index(shape.chunks) - given["chunk"]
        count = stop - first // shape.page_size
        each = count.divided_up(shape.chunks)
        begin, end = (stop - (each * left).minimum(count) for left in (after, after - 1))
        run(pages, name, values, (begin, end), first, length)


def _item_arguments(shape: DecodeAttention) -> list[Named]:
    t, pages = shape.types, ReadDensePages(shape)
    places = [Named(each, t[each]) for each in ("table", "lengths", "partial")]
    return [Named("q", t["queries"]), *pages.memories, *places, *indices("row", "group", "chunk"), *_chosen(shape)]


def _results(shape: DecodeAttention) -> list[Named]:
    sinks = [Named("sinks", shape.types["sinks"])] * shape.sink_logits
    return [Named("partial", shape.types["partial"]), *sinks, Named("mixed", shape.types["mixed"])]


def merge(shape: DecodeAttention, name: str) -> None:
    """Make @{name}_merge(partial[, sink logits], mixed [row, head * dim], begin, end): for the rows from begin to end,
    every head's chunks, each times its share, rounded; a row without a context is zero."""
    lanes, dim = shape.columns, shape.head_dim
    arguments = [*_results(shape), *indices("begin", "end")]
    with (
        function(f"{name}_merge", arguments) as given,
        loop(given["begin"], given["end"]) as row,
        loop(0, shape.num_heads) as head,
    ):
        at = [(row.index, head.index, chunk) for chunk in range(shape.chunks)]
        peaks, totals = ([given["partial"][*each, place] for each in at] for place in (dim, dim + 1))
        sink = given["sinks"][head.index] if shape.sink_logits else None
        parts = [each.broadcast(lanes) for each in shares(shape, peaks, totals, sink)]
        for column in range(0, dim, lanes):
            sums = [given["partial"].load(lanes, *each, column) for each in at]
            given["mixed"].store(mixed(sums, parts).to(shape.dtype), row.index, head.index * dim + column)


def attention(shape: DecodeAttention, name: str) -> None:
    """Make @{name}_item(queries, keys, values, table, lengths, partial, row, group, chunk[, chosen]) and
    @{name}_merge(partial[, sink logits], mixed, begin, end), with what they call."""
    walks(shape, name, [(ReadDensePages(shape), shape.types["table"])])
    item(shape, name)
    merge(shape, name)


def walks(shape: DecodeAttention, name: str, kinds: Iterable[tuple[DecodePages, str]]) -> None:
    """Make the walks over pages of these kinds, each with the type of its table."""
    if shape.skips_pages:
        seek(shape, name)
    for pages, table in kinds:
        tile(pages, name)
        walk(pages, table, name)


def attend_pages(shape: DecodeAttention) -> None:
    """Make @paged_attention(q [row, head, dim], keys, values, table, lengths[, selections], partial[, sink logits],
    mixed [row, head * dim]), run by all threads at once, with what it calls."""
    t = shape.types
    selections = [Named("selections", t["selections"])] * shape.selected
    places = [Named("table", t["table"]), Named("lengths", t["lengths"]), *selections]
    arguments = [*ReadDensePages(shape).memories, *places]

    def attend(given: dict[str, Value]) -> None:
        if shape.selected:
            with loop(0, shape.max_pages) as page:
                given["chosen"][page.index] = given["selections"][given["row"], given["group"], page.index]
        call_with("attend_item", _item_arguments(shape), given)

    attention(shape, "attend")
    attention_entry(shape, "paged_attention", arguments, _chosen(shape), attend)


def attention_entry(
    shape: DecodeAttention, name: str, arguments: Iterable[Named], buffers: Iterable[Named],
    attend: Callable[[dict[str, Value]], None],
) -> None:  # fmt: skip
    """Make @{name}(queries [row, head, dim], arguments, partial[, sink logits], mixed): every item, whose values
    `attend` takes by name, then every row merged, by the functions named `attend`. With `sizes` there are as many rows
    as its first number says. The threads have `buffers` of their own, and `q` for an item's queries."""
    t, each_group, lanes = shape.types, shape.queries_per_kv, shape.columns
    with entry(name, [Named("all", t["q"]), *arguments, *_results(shape)]) as given:
        own = {each.name: alloca(each.type) for each in (Named("q", t["queries"]), *buffers)}
        rows = given["sizes"][0].to("index") if "sizes" in given else index(shape.rows)
        with loop(given["thread"], rows * (shape.num_kv_heads * shape.chunks), given["threads"]) as turn:
            pair = turn.index // shape.chunks
            group, row = pair % shape.num_kv_heads, pair // shape.num_kv_heads
            with loop(0, each_group) as head, loop(0, shape.head_dim, lanes) as at:
                query = given["all"].load(lanes, row, group * each_group + head.index, at.index)
                own["q"].store(query, head.index, at.index)
            attend(given | own | {"chunk": turn.index % shape.chunks, "group": group, "row": row})
        wait()
        call("attend_merge", [*(given[each.name] for each in _results(shape)), *share(given, rows, 1)])
